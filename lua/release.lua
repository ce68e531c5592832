#!lua
-- release: end a lease and give its connection back, at most once.
--
-- KEYS[1] leases    hash  lease id -> 'node epoch start_ms prompt_tokens', of the replica
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] scoring   JSON: policy and constants
-- ARGV[3] prefix    of the pool's keys
-- ARGV[4] lease     id
-- ARGV[5] outcome   ok, failed, saturated, rejected or abandoned
-- ARGV[6] cool      ms a saturated node asked to be left alone
-- ARGV[7] chance    in [0, 1): spreads the back-off
-- ARGV[8] tokens    output tokens after the first, 0 when not counted
-- ARGV[9] decode    microseconds from the first token to the last
--
-- Returns 1 when this call ended the lease, 0 when it was already gone (released before, or
-- reaped): a retried or late release can never drive the counter below the truth.

local lease, node = finish(KEYS[1], ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]))
if not lease then return 0 end
local tokens = tonumber(ARGV[8])
if node and tokens > 0 then -- the token rate: sums in which an answer fades over the next fifty
  redis.call('HSET', node.key,
    'decode_tokens', string.format('%.3f', node.decode_tokens * 0.98 + tokens),
    'decode_us', string.format('%.0f', node.decode_us * 0.98 + tonumber(ARGV[9])))
end
return 1
