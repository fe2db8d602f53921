"""Keeps pages in a dict: the least that a backend can be."""

from ctypes import memmove, string_at

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
        outcomes, lengths = [], []
        sizes = batch.object_bytes.tolist()
        for row, (key, nbytes) in enumerate(zip(batch.keys, sizes)):
            if batch.operation is Operation.PUT:
                self.setdefault(key, string_at(int(batch.addresses[row, 0]), nbytes))
            found = self.get(key)
            if batch.operation is Operation.GET and found is not None:
                memmove(int(batch.addresses[row, 0]), found, min(len(found), nbytes))
            outcomes.append(Outcome.ABSENT if found is None else Outcome.OK)
            lengths.append(len(found or b""))
        return BatchResult(outcomes, lengths)

    def close(self):
        self.clear()
