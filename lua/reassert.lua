#!lua _node _grant
-- reassert: put back leases that a reaper or a flush took while the replica still carries them.
--
-- KEYS[1] leases    hash  lease id -> 'node epoch start_ms prompt_tokens', of the replica
-- KEYS[2] replicas  zset  replica -> heartbeat expiry, ms
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] replica   id of the owner
-- ARGV[4] ttl       ms until the replica counts as dead
-- ARGV[5...]        pairs: lease id, its record as first written
--
-- Returns how many were put back. One that is known already counts nothing; one whose node is
-- gone from the registry stays away.

whole(4, 4)
for i = 5, #ARGV, 2 do
  demand(string.find(ARGV[i + 1] or '', '^%S+ %d+ %d+ %d+[%d. ]*%+?$'), i + 1)
end
own(KEYS[2], ARGV[3], tonumber(ARGV[4]), clock())
local back = 0
for i = 5, #ARGV, 2 do
  local id = string.match(ARGV[i + 1], '^%S+')
  local base, capacity, models, state = unpack(redis.call('HMGET', prefix .. 'node:' .. id,
    'base', 'capacity', 'models', 'state'))
  if models and state ~= 'removed' and redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) == 1 then
    local lease = parse(ARGV[i], ARGV[i + 1])
    count(id, tonumber(base), tonumber(capacity), models, nil, lease.fresh, lease.held, lease.heard)
    back = back + 1
  end
end
return back
