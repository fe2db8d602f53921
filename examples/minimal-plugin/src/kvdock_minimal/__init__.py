"""Keeps pages in a dict: the least that a backend can be."""

from ctypes import memmove, string_at

from kvdock import KindSupport, Manifest, PoolKind, hookimpl, key_suffixes


@hookimpl
def kvdock_manifest():
    kinds = dict.fromkeys([PoolKind.MHA, PoolKind.MLA], KindSupport())
    return Manifest(name="minimal", api=1, summary="pages in a dict", kinds=kinds)


@hookimpl
def kvdock_register_pool():
    return {}


@hookimpl
def kvdock_key_suffix(pool, shard):
    return key_suffixes(pool, shard)


@hookimpl
def kvdock_batch_io(handle, batch):
    from kvdock import BatchResult, Operation, Outcome

    if batch.operation in (Operation.DELETE, Operation.CLEAR):
        return BatchResult.all(batch, Outcome.REFUSED)
    outcomes, lengths = [], []
    for row, (key, nbytes) in enumerate(zip(batch.keys, batch.object_bytes.tolist())):
        if batch.operation is Operation.PUT:
            handle.setdefault(key, string_at(int(batch.addresses[row, 0]), nbytes))
        found = handle.get(key)
        if batch.operation is Operation.GET and found is not None:
            memmove(int(batch.addresses[row, 0]), found, min(len(found), nbytes))
        outcomes.append(Outcome.ABSENT if found is None else Outcome.OK)
        lengths.append(len(found or b""))
    return BatchResult(outcomes, lengths)
