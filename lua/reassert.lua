#!lua
-- reassert: put back leases that a reaper or a flush took while the replica still carries them.
--
-- KEYS[1] leases    hash  lease id -> 'node epoch start_ms prompt_tokens', of the replica
-- KEYS[2] replicas  zset  replica -> heartbeat expiry, ms
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] scoring   JSON: policy and constants
-- ARGV[3] prefix    of the pool's keys
-- ARGV[4] replica   id of the owner
-- ARGV[5] ttl       ms until the replica counts as dead
-- ARGV[6...]        pairs: lease id, its record as first written
--
-- Returns how many were put back. One that is known already counts nothing; one whose node is
-- gone from the registry stays away.

own(KEYS[2], ARGV[4], tonumber(ARGV[5]))
local back = 0
for i = 6, #ARGV, 2 do
  local lease = parse(ARGV[i], ARGV[i + 1])
  local node = lease.node and read(lease.node)
  if node and redis.call('HEXISTS', KEYS[1], lease.id) == 0 then
    if lease.epoch ~= node.epoch then node.epoch = lease.epoch end -- keeps its late results fenced
    take(KEYS[1], lease.id, node, lease.size, lease.start_ms)
    back = back + 1
  end
end
return back
