-- _circuit: what an outcome says about a node; after _node.
--
-- Results of leases from before a trip, or of an earlier life of the node, say nothing. While the
-- circuit is half open only the trial's own result counts.

local function settle(node, lease, outcome, cool_ms, chance, n, now)
  -- Back-off doubles up to its bound, spread by chance: nodes that fell together do not all come
  -- back in the same instant.
  local function trip()
    node.circuit, node.trial, node.opens, node.tripped_at_ms = 'open', '', node.opens + 1, now
    local ms = math.min(OPEN_MS * 2 ^ math.min(node.opens - 1, 20), OPEN_MAX_MS)
    due(node, math.max(node.cooling_until_ms, now + math.floor(ms * (1 + 0.2 * chance))))
  end
  -- A trial that told nothing (client left, node busy) frees its place for the next request.
  local function free_trial(at_ms)
    node.circuit, node.trial = 'open', ''
    due(node, at_ms)
  end
  local trial = node.circuit == 'half_open' and node.trial == lease.id
  local fresh = node.circuit == 'closed' and lease.start_ms >= node.tripped_at_ms
  if outcome == 'ok' and (trial or fresh) then
    if trial then due(node, node.cooling_until_ms > now and node.cooling_until_ms or nil) end
    node.circuit, node.trial, node.streak, node.opens = 'closed', '', 0, 0
  elseif outcome == 'failed' and trial then
    trip()
  elseif outcome == 'failed' and fresh then
    node.streak = node.streak + 1
    if node.streak >= FAILURE_THRESHOLD then trip() end
  elseif outcome == 'saturated' and (trial or fresh) then
    node.cooling_until_ms = math.max(node.cooling_until_ms, now + cool_ms)
    if trial then free_trial(node.cooling_until_ms) else due(node, node.cooling_until_ms) end
  elseif trial then
    free_trial(now)
  end
  keep(node, n, now, 'circuit', node.circuit, 'trial', node.trial, 'streak', node.streak,
    'opens', node.opens, 'tripped_at_ms', node.tripped_at_ms,
    'cooling_until_ms', node.cooling_until_ms)
end
