-- _finish: ending a lease; after _circuit. The counter moves only when the lease does.

local function known_outcome(i)
  demand(string.find(ARGV[i], '^%l+$')
    and string.find(' ok failed saturated rejected abandoned ', ' ' .. ARGV[i] .. ' ', 1, true), i)
end

-- At most once; counter, record and score in one step. Returns nil when the lease was already
-- gone (released before, reaped, or never granted), else its node when that is still in the
-- life that the lease was granted in ('' otherwise), and its decode time per token, µs. `tokens`
-- came after the first one, within `decode_us`.
local function finish(leases, id, outcome, cool_ms, chance, tokens, decode_us)
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
  local row
  if POLICY == 'work' then
    row = row_of(lease.node, clock())
    row[INFLIGHT] = n
    if epoch == lease.epoch then over(row, clock(), lease, outcome, tokens, decode_us / 1000) end
    remember(lease.node, row, clock())
  end
  if epoch ~= lease.epoch or (outcome == 'ok' and bad == '0.0000') then -- nothing learned
    put(lease.node, tonumber(base), tonumber(capacity), models, n, row)
  else
    local node = read(lease.node)
    node.row = row
    settle(node, lease, outcome, cool_ms, chance, n, clock())
  end
  return epoch == lease.epoch and lease.node or '', tonumber(tpot_us or '')
end
