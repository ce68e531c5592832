"""Leases from the replica's side: held by one request, ended once, kept alive by a heartbeat.

Ending a lease never waits: the release goes onto the link in the same step that decides it,
so no cancellation can come between (BerriAI/litellm#28160). What Redis has not confirmed stays
on the books and is sent again by the heartbeat; a lease id is minted before its first call and
every script is idempotent by it, so sending again is always safe.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from app.cluster.link import NoScript, NotSent
from app.cluster.registry import UnknownNode
from app.errors import AttemptFailed, RedisAway, Refused
from app.model import Ask, Grant, Node, Outcome, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from types import TracebackType

    from app.cluster.health import Pulse
    from app.cluster.local import Local
    from app.cluster.registry import Registry
    from app.cluster.scripts import Scripts

log = logging.getLogger("leaseway.leases")


@dataclass(slots=True)
class _Ending:
    """What a lease is released with; kept until Redis has confirmed."""

    outcome: Outcome
    cool_ms: int = 0
    tokens: int = 0
    decode_us: int = 0


class Leases:
    """All leases of this replica in one pool.

    Three books: ``_pending`` (asked for: may exist), ``_held`` (known to exist: lease id → its
    record as Redis wrote it), ``_returning`` (release sent, not confirmed). Whatever Redis
    knows beyond these is an orphan; whatever is held and unknown to Redis was lost there.
    ``_alone`` are those of the held that this replica granted itself while Redis was away.
    """

    def __init__(
        self,
        scripts: Scripts,
        registry: Registry,
        pulse: Pulse,
        local: Local,
        *,
        replica: str,
        boot: str,
        ttl_ms: int,
        verdict_s: float,
    ) -> None:
        self._scripts = scripts
        self._registry = registry
        self._pulse = pulse
        self._local = local
        self._replica = replica
        self._boot = boot
        self._ttl_ms = ttl_ms
        self._verdict_s = verdict_s  # how long a first probe may take to be made and answered
        self._minted = 0
        self._pending: set[str] = set()
        self._held: dict[str, str] = {}
        self._alone: set[str] = set()
        self._returning: dict[str, _Ending] = {}
        self._debts: set[str] = set()  # of those returning, the ones whose release got no answer
        self._last_grant = (
            "",
            0.0,
        )  # record and monotonic time: tells Redis' clock when it is away
        self._tasks: set[asyncio.Task[Any]] = set()
        self.on_lost: Callable[[], None] = lambda: None  # Redis answers, but has lost everything

    def __repr__(self) -> str:
        return (
            f"<Leases {self._replica}: {len(self._held)} held, {len(self._pending)} pending, "
            f"{len(self._returning)} returning>"
        )

    @property
    def held(self) -> int:
        """Leases held now."""
        return len(self._held)

    @property
    def settled(self) -> bool:
        """Whether nothing is held, asked for or waiting for a confirmation."""
        return not (self._held or self._pending or self._returning)

    def hold(self, ask: Ask) -> Lease:
        """``async with leases.hold(ask) as lease``: leased on entry, ended on every exit.

        Entry raises ``Refused``.
        """
        return Lease(self, ask)

    def _mint(self) -> str:
        self._minted += 1
        lease_id = f"{self._boot}-{self._minted:x}"
        self._pending.add(lease_id)
        return lease_id

    async def _acquire(self, ask: Ask) -> tuple[Grant, Node]:
        lease_id = self._mint()
        try:
            answer = await self._asked(lease_id, ask, ())
            return await self._granted(lease_id, ask, answer, ())
        except BaseException as exc:
            if isinstance(exc, NotSent):
                self._pending.discard(lease_id)  # an outage must not pile up releases of nothing
            # The answer was lost, or the client left while the call was on the wire.
            self._give_back(lease_id, _Ending(Outcome.ABANDONED))
            if isinstance(exc, RedisAway):
                return self._grant_alone(ask, ())
            raise

    async def _asked(self, lease_id: str, ask: Ask, tried: Sequence[str]) -> Grant | Refusal:
        return await self._scripts.acquire(
            lease_id,
            ask.model,
            replica=self._replica,
            ttl_ms=self._ttl_ms,
            size=ask.prompt_tokens,
            output=ask.output_tokens,
            blocks=ask.blocks,
            tried=tried,
        )

    async def _move(
        self, ask: Ask, old: str, failure: AttemptFailed, tried: list[str]
    ) -> tuple[Grant, Node]:
        lease_id = self._mint()
        ending = _Ending(failure.outcome, failure.cool_ms)
        try:
            answer = await self._scripts.move(
                lease_id,
                ask.model,
                replica=self._replica,
                ttl_ms=self._ttl_ms,
                size=ask.prompt_tokens,
                output=ask.output_tokens,
                blocks=ask.blocks,
                old=old,
                outcome=ending.outcome,
                cool_ms=ending.cool_ms,
                tried=tried,
            )
        except BaseException as exc:
            self._give_back(old, ending)
            if isinstance(exc, NotSent):
                self._pending.discard(lease_id)
            self._give_back(lease_id, _Ending(Outcome.ABANDONED))
            if isinstance(exc, RedisAway):
                return self._grant_alone(ask, tried)
            raise
        self._drop(old)
        try:
            return await self._granted(lease_id, ask, answer, tried)
        except BaseException as exc:
            self._give_back(lease_id, _Ending(Outcome.ABANDONED))
            if isinstance(exc, RedisAway):  # it went while the granted node was looked up
                return self._grant_alone(ask, tried)
            raise

    async def _granted(
        self, lease_id: str, ask: Ask, answer: Grant | Refusal, tried: Sequence[str]
    ) -> tuple[Grant, Node]:
        if isinstance(answer, Refusal) and answer.reason == "new":
            answer = await self._wait_for_verdict(lease_id, ask, answer, tried)
        if isinstance(answer, Refusal):
            self._pending.discard(lease_id)
            known_here = answer.reason == "unknown" and ask.model in self._registry.models
            if known_here and await self._registry.forgot(ask.model):
                self.on_lost()  # the heartbeat fills it again; until then as if it were away
                return self._grant_alone(ask, tried)
            raise Refused(answer)
        self._last_grant = (answer.record, monotonic())
        self._keep(lease_id, answer.record, answer.node_id, ask)
        node = self._registry.known(answer.node_id, answer.epoch)
        if node is None:
            try:
                node = await self._registry.fetch(answer.node_id)
            except UnknownNode as exc:  # removed between the pick and this read
                raise Refused(Refusal("down", 1000)) from exc
        return answer, node

    async def _wait_for_verdict(
        self, lease_id: str, ask: Ask, refusal: Refusal, tried: Sequence[str]
    ) -> Grant | Refusal:
        """Nothing but nodes whose first probe is on its way: ask again until it has answered.

        A Redis that came back empty makes such nodes of those that served a moment ago.
        """
        answer: Grant | Refusal = refusal
        until, wait_s = monotonic() + self._verdict_s, refusal.retry_ms / 1000
        while isinstance(answer, Refusal) and answer.reason == "new":
            if monotonic() >= until:
                return Refusal("down", 1000)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.2)
            answer = await self._asked(lease_id, ask, tried)
        return answer

    def _grant_alone(self, ask: Ask, tried: Sequence[str]) -> tuple[Grant, Node]:
        """Redis is away: choose here, and tell it when it is back. Raises ``Refused``."""
        registry = self._registry
        node = self._local.pick(ask, registry.nodes.values(), registry.replicas, tried)
        if isinstance(node, Refusal):
            raise Refused(replace(node, degraded=True))
        lease_id = self._mint()
        record = f"{node.id} {node.epoch} {self._redis_ms()} {ask.prompt_tokens}"
        self._alone.add(lease_id)
        self._keep(lease_id, record, node.id, ask)
        return Grant(lease_id, node.id, node.epoch, record, node.base, False, degraded=True), node

    def _redis_ms(self) -> int:
        """What Redis' clock says now, by the last grant; 0 when there was none."""
        record, at = self._last_grant
        return int(record.split(" ")[2]) + int((monotonic() - at) * 1000) if record else 0

    def _keep(self, lease_id: str, record: str, node_id: str, ask: Ask) -> None:
        self._pending.discard(lease_id)
        self._held[lease_id] = record
        self._local.leased(lease_id, node_id, ask.prompt_tokens)
        if ask.stream:
            self._pulse.waiting[lease_id] = (node_id, monotonic())

    def _drop(self, lease_id: str) -> None:
        """Off all books but ``_returning``."""
        self._pending.discard(lease_id)
        self._alone.discard(lease_id)
        self._pulse.waiting.pop(lease_id, None)
        record = self._held.pop(lease_id, None)
        if record is not None:
            self._local.ended(lease_id, record.partition(" ")[0])

    def _first_token(self, lease_id: str, ttft_us: int) -> None:
        """Send the sample now, ahead of the release; a lost one is not worth a wait."""
        self._pulse.waiting.pop(lease_id, None)
        self._local.heard(lease_id)
        if lease_id in self._held:
            self._held[lease_id] += "+"  # as Redis marks it, should it have to be put back
        sent = self._scripts.send_first_token(lease_id, replica=self._replica, ttft_us=ttft_us)
        sent.add_done_callback(partial(self._sampled, lease_id, ttft_us))

    def _sampled(self, lease_id: str, ttft_us: int, sent: asyncio.Future[Any]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if isinstance(error, NoScript):
            self._spawn(self._scripts.first_token(lease_id, replica=self._replica, ttft_us=ttft_us))
        elif error is not None and not isinstance(error, RedisAway):
            log.error("the sample of %s was refused: %s", lease_id, error)

    def _give_back(self, lease_id: str, ending: _Ending) -> None:
        """Send the release now and keep it on the books until Redis has confirmed."""
        record = self._held.get(lease_id)
        if record is None and lease_id not in self._pending:
            return
        alone = lease_id in self._alone
        self._drop(lease_id)
        if alone:  # Redis never knew it: its outcome counts here
            self._judge_alone(record or "", ending)
            return
        self._returning[lease_id] = ending
        sent = self._scripts.send_release(
            lease_id,
            replica=self._replica,
            outcome=ending.outcome,
            cool_ms=ending.cool_ms,
            tokens=ending.tokens,
            decode_us=ending.decode_us,
        )
        sent.add_done_callback(partial(self._confirmed, lease_id))

    def _judge_alone(self, record: str, ending: _Ending) -> None:
        node_id = record.partition(" ")[0]
        if ending.outcome is Outcome.FAILED:
            self._local.failed(node_id)
        elif ending.outcome is Outcome.SATURATED:
            self._local.cool(node_id, ending.cool_ms / 1000)
        elif ending.outcome is Outcome.OK:
            self._local.answered(node_id)

    def _confirmed(self, lease_id: str, sent: asyncio.Future[Any]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if isinstance(error, NoScript):
            self._debts.add(lease_id)
            self._spawn(self._settle(lease_id))
        elif isinstance(error, RedisAway) or sent.cancelled():
            self._debts.add(lease_id)  # stays in _returning: the heartbeat sends it again
        else:
            self._returning.pop(lease_id, None)
            if error is not None:
                log.error("release of %s was refused: %s", lease_id, error)

    async def _settle(self, lease_id: str) -> None:
        """Release an unconfirmed lease and wait for the confirmation."""
        ending = self._returning.get(lease_id)
        if ending is not None:
            self._debts.add(lease_id)  # until the answer is here
            await self._scripts.release(
                lease_id,
                replica=self._replica,
                outcome=ending.outcome,
                cool_ms=ending.cool_ms,
                tokens=ending.tokens,
                decode_us=ending.decode_us,
            )
            self._returning.pop(lease_id, None)
        self._debts.discard(lease_id)

    def _spawn(self, call: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            level = logging.DEBUG if isinstance(error, RedisAway) else logging.ERROR
            log.log(level, "call after the fact failed: %s", error)

    async def beat(self) -> bool:
        """One heartbeat: renew, and when the books differ from Redis', mend both.

        Returns False when Redis did not know this replica (first beat, reaped, or flushed).
        Raises ``RedisAway``.
        """
        # On one FIFO link the count is exact: what was sent before this call is what Redis
        # has seen. Pending and returning leases may or may not be among them; those granted
        # alone are not, so they make a difference that is then mended.
        low, maybe = len(self._held), len(self._pending) + len(self._returning)
        count, known = await self._scripts.renew(replica=self._replica, ttl_ms=self._ttl_ms)
        for lease_id in list(self._debts):
            await self._settle(lease_id)
        self._local.forget()
        if known and not low <= count <= low + maybe:
            await self.reconcile()
        return known

    async def reconcile(self) -> None:
        """Make Redis' list of this replica's leases and the replica's own agree."""
        held_before = dict(self._held)
        listed = await self._scripts.listed(self._replica)
        missing = [
            (lease_id, record)
            for lease_id, record in held_before.items()
            if lease_id not in listed and lease_id in self._held
        ]
        # From here on Redis may know them: they are released like any other.
        self._alone.difference_update(lease_id for lease_id, _ in missing)
        for start in range(0, len(missing), 100):
            # What ended while the batch before was on its way must not come back.
            batch = [pair for pair in missing[start : start + 100] if pair[0] in self._held]
            back = await self._scripts.reassert(batch, replica=self._replica, ttl_ms=self._ttl_ms)
            if back:
                log.warning("put back %d leases that Redis had lost", back)
        own = self._pending | self._held.keys() | self._returning.keys()
        for lease_id in listed - own:
            log.warning("released %s: Redis knew a lease that this replica does not hold", lease_id)
            self._returning[lease_id] = _Ending(Outcome.ABANDONED)
            await self._settle(lease_id)

    async def leave(self) -> None:
        """Sign off: an expiry of now lets any reaper, first of all this one, end what is left."""
        await self._scripts.renew(replica=self._replica, ttl_ms=0)
        while (await self._scripts.reap())[2]:
            pass


class Lease:
    """One request's lease. It moves from node to node until the first byte; it ends once.

    ``node`` is the present node, ``tried`` the ids of all nodes that this request has had,
    in order; ``attempts`` their number.
    """

    __slots__ = ("_ask", "_ended", "_leases", "grant", "heard_at", "node", "started", "tried")

    def __init__(self, leases: Leases, ask: Ask) -> None:
        self._leases = leases
        self._ask = ask
        self._ended = False
        self.tried: list[str] = []
        self.grant: Grant
        self.node: Node
        self.started = self.heard_at = 0.0

    @property
    def attempts(self) -> int:
        """How many nodes this request has been leased."""
        return len(self.tried)

    async def __aenter__(self) -> Self:
        self._now_on(await self._leases._acquire(self._ask))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is None or isinstance(exc, asyncio.CancelledError):
            self.end(Outcome.ABANDONED)
        elif isinstance(exc, AttemptFailed):
            self.end(exc.outcome, cool_ms=exc.cool_ms)
        else:
            self.end(Outcome.ABANDONED)  # our own fault: says nothing about the node

    async def move(self, failure: AttemptFailed) -> None:
        """End this attempt with ``failure`` and lease another node, in one step.

        Raises ``Refused`` (the old lease is ended all the same).
        """
        self._ended = True
        try:
            self._now_on(
                await self._leases._move(self._ask, self.grant.lease_id, failure, self.tried)
            )
        except Refused as exc:
            self.grant.degraded |= exc.refusal.degraded
            raise
        self._ended = False

    def _now_on(self, granted: tuple[Grant, Node]) -> None:
        self.grant, self.node = granted
        self.started = monotonic()
        self.tried.append(self.node.id)

    def heard(self) -> None:
        """Bytes came from the node: it is alive. Sets ``heard_at`` (monotonic)."""
        self.heard_at = self._leases._pulse.heard[self.node.id] = monotonic()

    def first_token(self) -> None:
        """Record the TTFT of this attempt; call at the first generated content."""
        ttft_us = int((monotonic() - self.started) * 1e6)
        self._leases._first_token(self.grant.lease_id, ttft_us)

    def end(
        self, outcome: Outcome, *, cool_ms: int = 0, tokens: int = 0, decode_us: int = 0
    ) -> None:
        """End the lease; the first call counts, later ones do nothing. Never waits."""
        if self._ended:
            return
        self._ended = True
        self._leases._give_back(self.grant.lease_id, _Ending(outcome, cool_ms, tokens, decode_us))
