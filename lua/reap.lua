#!lua _node _circuit _finish
-- reap: end the leases of a replica whose heartbeat has run out. Any replica may call it.
--
-- KEYS[1] replicas  zset  replica -> heartbeat expiry, ms
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] limit     leases to end at most in this call (the script blocks the server)
--
-- Returns {leases ended, replica, 1 when more are waiting}; replica is '' when all are alive.
-- The dead replica's key of leases is built from the prefix.

whole(3, 3)
local now = clock()
local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1)[1]
if not dead then return {0, '', 0} end
local key, ended = prefix .. 'leases:' .. dead, 0
-- Not HSCAN from 0: once its first buckets are empty it finds nothing for ever.
for _, id in ipairs(redis.call('HRANDFIELD', key, tonumber(ARGV[3]))) do
  if finish(key, id, 'abandoned', 0, 0, 0, 0) then ended = ended + 1 end
end
local left = redis.call('HLEN', key)
if left == 0 then redis.call('ZREM', KEYS[1], dead) end
local others = redis.call('ZCOUNT', KEYS[1], '-inf', now)
return {ended, dead, (left > 0 or others > 0) and 1 or 0}
