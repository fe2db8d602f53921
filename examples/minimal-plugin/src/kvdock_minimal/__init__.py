"""Keeps pages in a dict: the least that a backend can be."""

from kvdock import KindSupport, Manifest, PoolKind, hookimpl


@hookimpl
def kvdock_manifest():
    kinds = dict.fromkeys([PoolKind.MHA, PoolKind.MLA], KindSupport())
    return Manifest(name="minimal", api=2, summary="pages in a dict", kinds=kinds)


@hookimpl
def kvdock_register_pool():
    return Store()


class Store(dict):
    def run(self, batch):
        from kvdock import BatchResult, Operation, Outcome

        if batch.operation in (Operation.DELETE, Operation.CLEAR):
            return BatchResult.all(batch, Outcome.REFUSED)
        outcomes = []
        for row, key in enumerate(batch.keys):
            if batch.operation is Operation.PUT:
                self.setdefault(key, batch.take(row))
            if key not in self:
                outcomes.append(Outcome.ABSENT)
            elif batch.operation is Operation.GET:
                outcomes.append(batch.land(row, self[key]))
            else:
                outcomes.append(Outcome.OK)
        return BatchResult.of(batch, outcomes)

    def close(self):
        self.clear()
