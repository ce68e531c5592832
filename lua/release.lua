#!lua _node _circuit _finish
-- release: end a lease and give its connection back, at most once.
--
-- KEYS[1] leases    hash  lease id -> 'node epoch start_ms prompt_tokens', of the replica
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] lease     id
-- ARGV[4] outcome   ok, failed, saturated, rejected or abandoned
-- ARGV[5] cool      ms a saturated node asked to be left alone
-- ARGV[6] chance    in [0, 1): spreads the back-off
-- ARGV[7] tokens    output tokens after the first, 0 when not counted
-- ARGV[8] decode    microseconds from the first token to the last
--
-- Returns 1 when this call ended the lease, 0 when it was already gone (released before, or
-- reaped): a retried or late release can never drive the counter below the truth.

known_outcome(4)
whole(5, 5)
local chance = tonumber(ARGV[6])
demand(chance and chance >= 0 and chance < 1, 6)
whole(7, 8)
local node, tpot_us = finish(KEYS[1], ARGV[3], ARGV[4], tonumber(ARGV[5]), chance,
  tonumber(ARGV[7]), tonumber(ARGV[8]))
if not node then return 0 end
-- Decode time per output token, mean over the last answers; policy `work` has it in its row.
if POLICY ~= 'work' and ARGV[7] ~= '0' and node ~= '' then
  local now_us = ARGV[8] / ARGV[7]
  tpot_us = tpot_us and tpot_us + (now_us - tpot_us) / 20 or now_us
  redis.call('HSET', prefix .. 'node:' .. node, 'tpot_us', string.format('%.1f', tpot_us))
end
return 1
