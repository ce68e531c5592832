-- _circuit: what an outcome says about a node; after _node.
--
-- Results of leases from before a trip, or of an earlier life of the node, say nothing. While the
-- circuit is half open only the trial's own result counts. Two ways to open it: a streak of
-- failures, or a failure rate over about the last twenty outcomes (`bad` of `seen`; counting
-- starts with a failure and ends when that has faded, so a good node costs nothing).

-- A trial answers: requests are let in again. Its streak ends with a whole answer only: until one
-- has come, a single failure opens the circuit again, for longer.
local function let_in(node, now)
  due(node, node.cooling_until_ms > now and node.cooling_until_ms or nil)
  node.circuit, node.trial, node.since_ms = 'closed', '', now
end

local function settle(node, lease, outcome, cool_ms, chance, n, now)
  -- Back-off doubles up to its bound. The first time is exact: one request finds out, whatever
  -- many wait for it. Later ones are spread by chance: nodes that stay down together are not all
  -- tried in the same instant for ever.
  local function trip(cause)
    node.circuit, node.trial, node.opens, node.tripped_at_ms = 'open', '', node.opens + 1, now
    node.cause = cause
    local ms = math.min(OPEN_MS * 2 ^ math.min(node.opens - 1, 20), OPEN_MAX_MS)
    if node.opens > 1 then ms = math.floor(ms * (1 + 0.2 * chance)) end
    due(node, math.max(node.cooling_until_ms, now + ms))
  end
  -- A trial that told nothing (client left, node busy) frees its place for the next request.
  local function free_trial(at_ms)
    node.circuit, node.trial = 'open', ''
    due(node, at_ms)
  end
  local trial = node.circuit == 'half_open' and node.trial == lease.id
  local fresh = node.circuit == 'closed' and lease.start_ms >= node.tripped_at_ms
  local function fade(failed)
    node.bad, node.seen = node.bad * 0.95 + failed, node.seen * 0.95 + 1
    if node.bad < 0.05 then node.bad, node.seen, node.opens = 0, 0, 0 end
  end
  if outcome == 'ok' and (trial or fresh) then
    -- A broken node that is whole again starts anew; a flaky one is remembered, so that its next
    -- failure opens again, for longer.
    if node.cause == 'streak' and (trial or node.streak >= FAILURE_THRESHOLD) then
      node.bad, node.seen, node.opens = 0, 0, 0
    end
    if trial then let_in(node, now) end
    fade(0)
    node.streak = 0
  elseif outcome == 'failed' and trial then
    fade(1)
    trip(node.cause)
  elseif outcome == 'failed' and fresh then
    fade(1)
    node.streak = node.streak + 1
    if node.streak >= FAILURE_THRESHOLD then trip('streak')
    elseif node.seen >= MIN_SAMPLES and node.bad / node.seen > FAILURE_RATE then trip('rate') end
  elseif outcome == 'saturated' and (trial or fresh) then
    node.cooling_until_ms = math.max(node.cooling_until_ms, now + cool_ms)
    if trial then free_trial(node.cooling_until_ms) else due(node, node.cooling_until_ms) end
  elseif trial then
    free_trial(now)
  end
  keep(node, n, now, 'circuit', node.circuit, 'trial', node.trial, 'streak', node.streak,
    'opens', node.opens, 'tripped_at_ms', node.tripped_at_ms, 'cause', node.cause,
    'cooling_until_ms', node.cooling_until_ms, 'since_ms', node.since_ms,
    'bad', string.format('%.4f', node.bad), 'seen', string.format('%.4f', node.seen))
end
