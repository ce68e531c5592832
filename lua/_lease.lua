-- _lease: choosing a node, taking its lease, ending it. Prepended to every verb after _node.
-- The counter moves only when a lease moves; a lease moves at most once in each direction.

-- Open the circuit: back-off doubles up to its bound, spread by chance so that nodes which
-- fell together do not all come back in the same instant.
local function trip(node, chance)
  node.circuit, node.trial, node.opens, node.tripped_at_ms = 'open', '', node.opens + 1, now
  local ms = math.min(scoring.open_ms * 2 ^ math.min(node.opens - 1, 20), scoring.open_max_ms)
  due(node, now + math.floor(ms * (1 + 0.2 * chance)))
end

local function close(node)
  if node.circuit ~= 'closed' then due(node, node.cooling_until_ms > now and node.cooling_until_ms or nil) end
  node.circuit, node.trial, node.streak, node.opens = 'closed', '', 0, 0
end

-- A trial that told nothing (client left, node busy) frees its place for the next request.
local function free_trial(node, at_ms)
  node.circuit, node.trial = 'open', ''
  due(node, at_ms)
end

-- What an outcome says about the circuit. Results of leases from before a trip, or of an
-- earlier life of the node, say nothing; the trial's own result decides.
local function judge(node, lease, outcome, cool_ms, chance)
  local trial = node.trial == lease.id and node.circuit == 'half_open'
  local fresh = node.circuit == 'closed' and lease.start_ms >= node.tripped_at_ms
  if outcome == 'ok' then
    if trial or fresh then close(node) end
  elseif outcome == 'failed' then
    if trial then trip(node, chance) end
    if fresh then
      node.streak = node.streak + 1
      if node.streak >= scoring.failure_threshold then trip(node, chance) end
    end
  elseif outcome == 'saturated' then
    node.cooling_until_ms = math.max(node.cooling_until_ms, now + cool_ms)
    if trial then free_trial(node, node.cooling_until_ms)
    elseif node.circuit == 'closed' then due(node, node.cooling_until_ms) end
  elseif trial then
    free_trial(node, now)
  end
end

local function keep(node)
  redis.call('HSET', node.key, 'circuit', node.circuit, 'streak', node.streak, 'opens', node.opens,
    'tripped_at_ms', node.tripped_at_ms, 'trial', node.trial,
    'cooling_until_ms', node.cooling_until_ms)
end

local function parse(id, text)
  local node, epoch, start, size = string.match(text, '^(%S+) (%d+) (%d+) (%d+)$')
  return {id = id, node = node, epoch = tonumber(epoch), start_ms = tonumber(start), size = tonumber(size)}
end

-- End a lease: at most once, counter and record and score in one step. Returns nil when it was
-- already gone (released before, reaped, or never granted), else the lease and the node's
-- record when that is still of the lease's epoch.
local function finish(leases, id, outcome, cool_ms, chance)
  local text = redis.call('HGET', leases, id)
  if not text then return nil end
  redis.call('HDEL', leases, id)
  local lease = parse(id, text)
  local n = redis.call('DECR', prefix .. 'active:' .. lease.node)
  if n < 0 then -- the counter was damaged from outside: never leave it below the truth's floor
    redis.call('SET', prefix .. 'active:' .. lease.node, 0)
    n = 0
  end
  local node = read(lease.node)
  if not node then
    if n == 0 then redis.call('DEL', prefix .. 'active:' .. lease.node) end
  elseif node.state == 'removed' then
    if n == 0 then forget(node) end
  else
    if lease.epoch == node.epoch then
      local before = node.circuit .. node.streak .. node.trial .. node.cooling_until_ms
      judge(node, lease, outcome, cool_ms, chance)
      if before ~= node.circuit .. node.streak .. node.trial .. node.cooling_until_ms then keep(node) end
    end
    rescore(node, n)
    return lease, lease.epoch == node.epoch and node or nil
  end
  return lease, nil
end

-- Count a lease on a node and write its record. `at_ms` is its start.
local function take(leases, id, node, size, at_ms)
  local n = redis.call('INCR', prefix .. 'active:' .. node.id)
  if n < 1 then
    redis.call('SET', prefix .. 'active:' .. node.id, 1)
    n = 1
  end
  redis.call('HSET', leases, id, string.format('%s %d %d %d', node.id, node.epoch, at_ms, size))
  if scoring.policy == 'round_robin' then
    node.picked = redis.call('INCR', prefix .. 'turn')
    redis.call('HSET', node.key, 'picked', node.picked)
  end
  rescore(node, n)
end

-- The open node that is due for its single trial, or a cooled one made eligible again.
local function trial(due_key, id, tried)
  local first = redis.call('ZRANGEBYSCORE', due_key, '-inf', now, 'LIMIT', 0, 1)[1]
  if not first or tried[first] then return nil end
  local node = read(first)
  if not node then
    redis.call('ZREM', due_key, first)
  elseif node.circuit == 'closed' then
    due(node, nil)
    rescore(node, active(first))
  elseif node.state == 'active' and node.health == 'ok' and active(first) < node.capacity then
    node.circuit, node.trial = 'half_open', id
    due(node, now + scoring.trial_ms) -- a trial that is never heard of again is not for ever
    keep(node)
    return node
  else
    due(node, now + scoring.open_ms) -- open and also down, draining or full: look again later
  end
  return nil
end

-- The best untried node of a model: (id, score). Of equals, one by chance. O(log N).
local function pick(score_key, tried, tries, chance)
  if scoring.policy == 'p2c' or scoring.policy == 'peak_ewma' then
    local m = redis.call('ZCOUNT', score_key, '(0', '+inf')
    if m > tries + 1 then
      local a = math.floor(chance * m)
      local b = math.floor((chance * m - a) * (m - 1))
      if b >= a then b = b + 1 end
      local best = redis.call('ZREVRANGE', score_key, math.min(a, b), math.min(a, b), 'WITHSCORES')
      if not tried[best[1]] then return best[1], tonumber(best[2]) end
      best = redis.call('ZREVRANGE', score_key, math.max(a, b), math.max(a, b), 'WITHSCORES')
      if not tried[best[1]] then return best[1], tonumber(best[2]) end
    end
  end
  local top = redis.call('ZREVRANGE', score_key, 0, tries + 1, 'WITHSCORES')
  local ids, best = {}, nil
  for i = 1, #top, 2 do
    if not tried[top[i]] and tonumber(top[i + 1]) > 0 and (not best or top[i + 1] == best) then
      best = top[i + 1]
      ids[#ids + 1] = top[i]
    end
  end
  if #ids < 2 then return ids[1], tonumber(best or 0) end
  local above = redis.call('ZCOUNT', score_key, '(' .. best, '+inf')
  local equals = redis.call('ZCOUNT', score_key, best, best)
  local at = above + math.floor(chance * equals)
  local drawn = redis.call('ZREVRANGE', score_key, at, at)[1]
  if tried[drawn] then drawn = ids[1 + math.floor(chance * #ids)] end
  return drawn, tonumber(best)
end

-- Why no node was leased: {reason, retry in ms}. Looks at a bounded number of nodes.
local function refuse(score_key, due_key, tried)
  local ids = redis.call('ZREVRANGE', score_key, 0, 15)
  if #ids == 0 then return {'unknown', '0'} end
  local spent, full = true, false
  for _, id in ipairs(ids) do
    if not tried[id] then spent = false end
    local node = read(id)
    if node and not tried[id] and not usable(node, active(id)) and usable(node, -1) then full = true end
  end
  if spent then return {'spent', '0'} end
  if full then return {'full', '1000'} end
  local next_due = redis.call('ZRANGE', due_key, 0, 0, 'WITHSCORES')[2]
  return {'down', tostring(next_due and math.max(1, tonumber(next_due) - now) or 1000)}
end

-- Choose, lease, re-score: the one step that `acquire` and `move` share.
local function grant(score_key, due_key, leases, id, size, chance, tried, tries)
  local node, best, half_open = trial(due_key, id, tried), 0, '1'
  if not node then
    local chosen
    chosen, best = pick(score_key, tried, tries, chance)
    half_open = '0'
    node = chosen and read(chosen)
    while chosen and not (node and usable(node, active(chosen))) do
      -- A score that its record does not bear out (a node that just filled up, cooled or was
      -- edited by hand): mend the set and look again. Each round takes one such node out.
      if node then rescore(node, active(chosen)) else redis.call('ZREM', score_key, chosen) end
      chosen, best = pick(score_key, tried, tries, chance)
      node = chosen and read(chosen)
    end
  end
  if not node then return refuse(score_key, due_key, tried) end
  take(leases, id, node, size, now)
  return {'leased', node.id, tostring(node.epoch), tostring(now), string.format('%.17g', best), half_open}
end

-- A replica that leases is alive: one whose heartbeat was reaped is listed again at once, so
-- that no lease is ever without an owner who can be found dead.
local function own(replicas, replica, ttl_ms)
  if not redis.call('ZSCORE', replicas, replica) then
    redis.call('ZADD', replicas, now + ttl_ms, replica)
  end
end

-- The nodes that a request has tried, as a set and a count: ARGV[from] and on.
local function tried_from(from)
  local tried, tries = {}, 0
  for i = from, #ARGV do
    tried[ARGV[i]] = true
    tries = tries + 1
  end
  return tried, tries
end
