#!lua
-- first_token: a lease saw its first generated token: push the TTFT sample, re-score.
-- The streak is cleared by a whole good answer only (release): a node that starts every answer
-- and breaks it off would otherwise never open its circuit.
--
-- KEYS[1] leases    hash  lease id -> 'node epoch start_ms prompt_tokens', of the replica
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] scoring   JSON: policy and constants
-- ARGV[3] prefix    of the pool's keys
-- ARGV[4] lease     id
-- ARGV[5] ttft      microseconds from the lease to the first generated token
--
-- Returns 1, or 0 when the lease is gone or the node was replaced meanwhile: no sample then.

local text = redis.call('HGET', KEYS[1], ARGV[4])
if not text then return 0 end
local lease, ttft_us = parse(ARGV[4], text), tonumber(ARGV[5])
local node = read(lease.node)
if not node or node.epoch ~= lease.epoch or node.state == 'removed' then return 0 end

local key, horizon = prefix .. 'ttft:' .. node.id, now - scoring.sample_max_age_ms
if node.last_sample_ms < horizon then -- the whole window is too old; its list has expired too
  redis.call('DEL', key)
  node.sum_us, node.samples = 0, 0
end
node.samples = redis.call('LPUSH', key, string.format('%d:%d:%d', ttft_us, lease.size, now))
node.sum_us = node.sum_us + ttft_us
for _ = 1, 8 do -- bounded: a shrunk window or a few aged samples leave over the next calls
  local tail_us, taken = string.match(redis.call('LINDEX', key, -1), '^(%d+):%d+:(%d+)$')
  if node.samples <= scoring.window and tonumber(taken) >= horizon then break end
  redis.call('RPOP', key)
  node.samples, node.sum_us = node.samples - 1, node.sum_us - tonumber(tail_us)
end
redis.call('PEXPIRE', key, scoring.sample_max_age_ms)

-- Peak EWMA (Finagle's PeakEwma.scala): a peak counts at once, calm decays over 10 s.
local fade = math.exp(-(now - node.last_sample_ms) / 10000)
node.ewma_us = ttft_us > node.ewma_us and ttft_us or node.ewma_us * fade + ttft_us * (1 - fade)
node.last_sample_ms = now
if node.trial == lease.id then -- the half-open trial answers: the circuit closes here, not at the end
  close(node)
  keep(node)
end
redis.call('HSET', node.key, 'sum_us', string.format('%d', node.sum_us), 'samples', node.samples,
  'last_sample_ms', now, 'ewma_us', string.format('%.0f', node.ewma_us))
rescore(node, active(node.id))
return 1
