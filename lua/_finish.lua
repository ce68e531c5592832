-- _finish: ending a lease; after _circuit. The counter moves only when the lease does.

local function parse(id, text)
  local node, epoch, start, size, heard = string.match(text, '^(%S+) (%d+) (%d+) (%d+)(%+?)$')
  return {id = id, node = node, epoch = epoch, start_ms = tonumber(start), size = size,
    heard = heard == '+'}
end

local function known_outcome(i)
  demand(string.find(ARGV[i], '^%l+$')
    and string.find(' ok failed saturated rejected abandoned ', ' ' .. ARGV[i] .. ' ', 1, true), i)
end

-- At most once; counter, record and score in one step. Returns nil when the lease was already
-- gone (released before, reaped, or never granted), else its node when that is still in the
-- life that the lease was granted in ('' otherwise), and its decode time per token, µs.
local function finish(leases, id, outcome, cool_ms, chance)
  local text = redis.call('HGET', leases, id)
  if not text then return nil end
  redis.call('HDEL', leases, id)
  local lease = parse(id, text)
  local n = redis.call('DECR', prefix .. 'active:' .. lease.node)
  if n < 0 then -- the counter was damaged from outside: never leave it below zero
    redis.call('SET', prefix .. 'active:' .. lease.node, 0)
    n = 0
  end
  local base, capacity, models, epoch, bad, state, tpot_us = unpack(redis.call('HMGET',
    prefix .. 'node:' .. lease.node, 'base', 'capacity', 'models', 'epoch', 'bad', 'state', 'tpot_us'))
  if not models or state == 'removed' then
    if n == 0 then forget(lease.node) end
    return ''
  end
  if epoch ~= lease.epoch or (outcome == 'ok' and bad == '0.0000') then -- nothing learned
    put(lease.node, tonumber(base), tonumber(capacity), models, n)
  else
    settle(read(lease.node), lease, outcome, cool_ms, chance, n, clock())
  end
  return epoch == lease.epoch and lease.node or '', tonumber(tpot_us or '')
end
