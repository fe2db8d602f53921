// Decision records are found last: they repeat the words of the pages that readers want.
var Scorer = {
  score: ([docname, , , , score]) =>
    docname.startsWith("decisions/") ? score - 100 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
