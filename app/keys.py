"""The one address of every Redis key name.

All keys of a pool carry its hash tag ``{pool}``, so a pool lives in one cluster slot and every
script may touch them together. The namespace is a prefix, ``lw`` by default; when the meaning
of stored data changes, the prefix changes with it.
"""

from __future__ import annotations

from functools import lru_cache


class PoolKeys:
    """Key names of one pool. ``prefix`` is what scripts build per-node and per-model keys from."""

    __slots__ = (
        "blocks", "changes", "edits", "files", "leases_prefix", "nodes", "prefix", "probes",
        "replicas", "sweeps", "turn", "weights", "work",
    )  # fmt: skip

    def __init__(self, namespace: str, pool: str) -> None:
        self.prefix = f"{namespace}:{{{pool}}}:"
        self.nodes = self.prefix + "nodes"
        self.replicas = self.prefix + "replicas"
        self.probes = self.prefix + "probes"  # ZSET: node → ms at which its next probe is due
        self.sweeps = self.prefix + "sweeps"  # ZSET: node → ms at which its next sweep is due
        self.turn = self.prefix + "turn"  # STRING: picks so far, of the policy round_robin
        self.weights = self.prefix + "weights"  # ZSET: node → K, of policy `work`
        self.work = self.prefix + "work"  # HASH: node → what policy `work` has learned, packed
        self.files = self.prefix + "files"  # HASH: node → what the settings file says of it, JSON
        self.edits = self.prefix + "edits"  # HASH: node → ``version edit``, what was set by hand
        self.changes = self.prefix + "changes"  # STRING: the newest version of all edits
        self.blocks = self.prefix + "prefix"  # HASH: block of a prompt → its tokens, its nodes
        self.leases_prefix = self.prefix + "leases:"

    def node(self, node_id: str) -> str:
        """HASH: the node's record."""
        return f"{self.prefix}node:{node_id}"

    def active(self, node_id: str) -> str:
        """STRING: leases in flight on the node."""
        return f"{self.prefix}active:{node_id}"

    def ttft(self, node_id: str) -> str:
        """LIST: the last W samples, ``ttft_us:prompt_tokens:taken_at_ms``, newest first."""
        return f"{self.prefix}ttft:{node_id}"

    def cached(self, node_id: str) -> str:
        """ZSET: block of a prompt that the node is thought to hold → when it was last used, ms."""
        return f"{self.prefix}cached:{node_id}"

    def score(self, model: str) -> str:
        """ZSET: node → live score; highest wins, 0 = not eligible."""
        return f"{self.prefix}score:{model}"

    def due(self, model: str) -> str:
        """ZSET: node → time (ms) at which an open or cooling node may be tried again."""
        return f"{self.prefix}due:{model}"

    def leases(self, replica: str) -> str:
        """HASH: lease id → ``node epoch start_ms prompt_tokens``, from policy `work` also
        ``fresh_tokens ahead_tokens``; ``+`` behind it once sampled."""
        return self.leases_prefix + replica

    def limit(self, key: str) -> str:
        """HASH: how much of its limits the API key of this name has used (``lua/_limit.lua``)."""
        return f"{self.prefix}limit:{key}"


def dial_key(pool: str) -> str:
    """A key of the pool's slot that is never there: writing to it shows whether scripts may."""
    return f"leaseway:{{{pool}}}:dial"


@lru_cache(maxsize=256)
def pool_keys(namespace: str, pool: str) -> PoolKeys:
    """The keys of ``pool``; cached because every request asks for them."""
    return PoolKeys(namespace, pool)
