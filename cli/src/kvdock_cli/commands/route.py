"""The command `kvdock route`: wiring only."""

from __future__ import annotations

import sys

import attrs

from kvdock import Dock, DType, Layout, Plan
from kvdock.config import load_configuration
from kvdock.errors import NoRoute, PoolError
from kvdock.models import Deployment, assemble
from kvdock.pools import ContextSplit, sharing_limits
from kvdock_cli.arguments import model_of, needs_of, settings_of
from kvdock_cli.commands import planned_namespace
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import route as report
from kvdock_cli.reports.memory import Memory
from kvdock_cli.terminal import style_of


def route(  # noqa: PLR0913 - what routing depends on
    command: tuple[str, ...] = (),
    /,
    *,
    model: str = "",
    draft: str = "",
    pool: tuple[str, ...] = (),
    layers: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    dcp: int = 1,
    pp_layers: tuple[int, ...] = (),
    context: ContextSplit = ContextSplit.REPLICATED,
    interleave_tokens: int = 1,
    share_tp: tuple[int, ...] = (),
    rank: int = 0,
    page_tokens: int = 0,
    dtype: DType | None = None,
    layout: Layout = Layout.PAGE_OBJECT,
    packed: bool = False,
    pages: int | None = None,
    host_ranks: int = 1,
    backend: tuple[str, ...] = (),
    to: tuple[str, ...] = (),
    need: tuple[str, ...] = (),
    strict: bool = False,
    all_: bool = False,
    namespace: bool = False,
    against: str = "",
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Show which backend would keep which pool, and why.

    With --namespace, say instead whether an engine with a new command would find the
    pages that are stored, and which field of it separates them if not; exit 1 then.

    Args:
        command: With --namespace, the engine's command, such as vllm serve MODEL,
            behind two dashes.
        model: A model that kvdock describes, or a TOML or JSON file that
            describes one.
        draft: The draft model that goes with it.
        pool: A pool in words, family=mha,name=kv,heads=8,head_dim=128, with
            shapes as 16x64 and layers as 0-2+5; may be given several times.
            Without a model the first one is the anchor.
        layers: Layers of a model that is given in pools alone.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        cp: Context-parallel ranks.
        dcp: Decode-context-parallel ranks.
        pp_layers: Layers of a pipeline stage; given once for each stage where
            they are not even.
        context: How context-parallel ranks divide attention.
        interleave_tokens: Consecutive tokens that one rank takes, where tokens
            are divided.
        share_tp: A TP size that is to share objects of heads with this one;
            given once for each of them.
        rank: The process that is shown, counted over all of them.
        page_tokens: Tokens of a page; 0 for the model's own.
        dtype: Element type of attention KV, if not the model's own.
        layout: How pages lie in host memory.
        packed: Draft layers lie behind the target's in the same pools.
        pages: Also say how many pages of every pool host memory has room for; it
            is a problem if they are fewer than this number.
        host_ranks: Processes like this one that share the host.
        backend: Consider only this backend; several in order of preference.
        to: Give a pool to one backend only, as POOL=BACKEND.
        need: What the deployment asks of every backend, as FIELD=VALUE
            (sharing=cluster) or FIELD (integrity).
        strict: Take optional pools for required ones.
        all_: Also say of every other backend why it is not chosen.
        namespace: Compare the namespace of an engine's command, where that engine is
            installed; no model is loaded.
        against: With --namespace, a store's root directory or the URL of a bucket, or a
            file with the line of JSON that this prints for another command; the
            directory of the settings if left out.
        set_: With --namespace, a setting of the adapter or its backend, as KEY=VALUE;
            may be given several times.
        json: Print one line of JSON.
    """
    if namespace:
        return planned_namespace.compare(command, against, set_, as_json=json)
    if command or against or set_:
        raise UsageProblem("a command, --against and --set are for --namespace")
    if host_ranks < 1 or (pages or 0) < 0:
        raise UsageProblem("--host-ranks is at least 1, and --pages at least 0")
    about = model_of(model, pool, layers)
    try:
        deployment = Deployment(
            tp_size=tp,
            pp_size=pp,
            cp_size=cp,
            dcp_size=dcp,
            pp_layers=pp_layers,
            context=context,
            interleave_tokens=interleave_tokens,
            share_tp=share_tp,
            page_tokens=page_tokens,
            dtype=dtype,
            layout=layout,
            packed=packed,
        )
        assembly = assemble(about, deployment, draft=draft)
        shards = [*assembly.shards()]
        if not 0 <= rank < len(shards):
            raise UsageProblem(
                f"rank {rank} does not exist among {len(shards)} processes"
            )
        shard = shards[rank]
        given = load_configuration()
        needs = needs_of(need)
        if given.core.tenants.rooms:
            needs = attrs.evolve(needs, tenant_quotas=True)
        plan = Dock.load(settings=given.backends).plan(
            assembly.pools,
            shard,
            backend,
            tiers=() if backend else given.tiers,
            overrides=settings_of(to, "--to", "POOL=BACKEND"),
            strict=strict,
            needs=needs,
        )
    except PoolError as error:
        raise UsageProblem(error.what, fix=error.fix) from error
    except NoRoute as error:
        if json or not isinstance(error.plan, Plan):
            raise
        # The same, with a table that fits where errors go.
        shown = report.report(error.plan).text(style_of(sys.stderr))
        what = f"{error.what.splitlines()[0]}\n{shown}"
        raise NoRoute(what, fix=error.fix, plan=error.plan) from error
    limits = [
        limit
        for one in plan.accepted
        for limit in sharing_limits(
            one.pool,
            stages=shard.pp_size,
            tp_size=tp,
            share_tp=share_tp,
            # Layers of a draft model that lie behind the target's.
            packed_layers=sum(layer >= about.layers for layer in one.pool.layers)
            if packed and not one.pool.draft
            else 0,
        )
    ]
    memory = None
    if pages is not None:
        memory = Memory.of(assembly.pools, shard, pages, host_ranks)
    done = report.report(plan, every=all_, limits=limits, memory=memory)
    return emit(done, as_json=json)
