#!lua _node _circuit _finish
-- first_token: a lease saw its first generated token: push the TTFT sample, re-score.
-- The streak is cleared by a whole good answer only (release): a node that starts every answer
-- and breaks it off would otherwise never open its circuit.
--
-- KEYS[1] leases    hash  lease id -> 'node epoch start_ms prompt_tokens', of the replica
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] lease     id
-- ARGV[4] ttft      microseconds from the lease to the first generated token
--
-- Returns 1, or 0 when the lease is gone, the node was replaced meanwhile, or the lease has left
-- its sample already (a '+' behind its record says so): no sample then.

whole(4, 4)
local text = redis.call('HGET', KEYS[1], ARGV[3])
if not text then return 0 end
local lease, ttft_us = parse(ARGV[3], text), tonumber(ARGV[4])
local node, now = read(lease.node), clock()
if not node or node.epoch ~= tonumber(lease.epoch) or node.state == 'removed' or lease.heard then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[3], text .. '+')

local key, horizon = prefix .. 'ttft:' .. node.id, now - SAMPLE_MAX_AGE_MS
if node.last_sample_ms < horizon then -- the whole window is too old; its list has expired too
  redis.call('DEL', key)
  node.sum_us = 0
end
node.samples = redis.call('LPUSH', key, string.format('%d:%s:%d', ttft_us, lease.size, now))
node.sum_us = node.sum_us + ttft_us
for _ = 1, 8 do -- bounded: a shrunk window or a few aged samples leave over the next calls
  local tail_us, taken = string.match(redis.call('LINDEX', key, -1), '^(%d+):%d+:(%d+)$')
  if node.samples <= WINDOW and tonumber(taken) >= horizon then break end
  redis.call('RPOP', key)
  node.samples, node.sum_us = node.samples - 1, node.sum_us - tonumber(tail_us)
end
redis.call('PEXPIRE', key, SAMPLE_MAX_AGE_MS)

-- Peak EWMA (Finagle's PeakEwma.scala): a peak counts at once, calm decays over 10 s.
local fade = math.exp(-(now - node.last_sample_ms) / 10000)
node.ewma_us = ttft_us > node.ewma_us and ttft_us
  or math.floor(node.ewma_us * fade + ttft_us * (1 - fade) + 0.5)

-- The best this node has been (where an idle node's T decays to), forgotten over five minutes: toward
-- what it is now, not the mean, or one request in a stale window would take the best away.
local mean = node.sum_us / node.samples
if node.best_us == 0 or mean < node.best_us then node.best_us = mean
else
  node.best_us = node.best_us
    + (ttft_us - node.best_us) * (1 - math.exp((node.last_sample_ms - now) / 300000))
end
node.last_sample_ms = now
if POLICY == 'work' then
  node.row = row_of(node.id, now)
  if lease.ahead then
    heard_of(node.row, now, ttft_us / 1000, lease.fresh, lease.ahead)
  else -- granted while Redis was away: nobody knows what was ahead of it
    node.row[SILENT_SINCE] = now
    answered(node.row, lease.fresh)
  end
  remember(node.id, node.row, now)
end
node.waiting_until_ms = 0 -- it answers again
if node.circuit == 'half_open' and node.trial == lease.id then
  let_in(node, now)
  redis.call('HSET', node.key, 'circuit', 'closed', 'trial', '', 'since_ms', now)
end
keep(node, active(node.id), now, 'sum_us', string.format('%d', node.sum_us),
  'samples', node.samples, 'last_sample_ms', now, 'waiting_until_ms', 0,
  'ewma_us', string.format('%.0f', node.ewma_us), 'best_us', string.format('%.0f', node.best_us))
return 1
