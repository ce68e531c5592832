#!lua _node _circuit
-- circuit: an operator opens a node's circuit for a time, or closes it. After that time one trial
-- decides, as after any opening.
--
-- KEYS[1] node      hash  the record
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] id        of the node
-- ARGV[4] state     'open' or 'closed'
-- ARGV[5] open      ms until the trial; 0 when it is to be closed
--
-- Returns {circuit before, circuit now}, or {'', ''} when the node is not known.

demand(ARGV[4] == 'open' or ARGV[4] == 'closed', 4)
whole(5, 5)
local node, now = read(ARGV[3]), clock()
if not node or node.state == 'removed' then return {'', ''} end
local before = node.circuit
-- What was leased before says nothing: results of a node that was opened by hand do not close it,
-- and those of a bad spell do not open again what was closed by hand.
node.tripped_at_ms, node.streak, node.opens = now, 0, 0
local bad = '0.0000' -- nothing is learned from good answers then, so an open circuit has some
if ARGV[4] == 'open' then
  node.circuit, node.trial, node.opens, node.cause, bad = 'open', '', 1, 'streak', '1.0000'
  due(node, math.max(node.cooling_until_ms, now + tonumber(ARGV[5])))
else
  node.cooling_until_ms = 0
  let_in(node, now)
end
keep(node, active(node.id), now, 'circuit', node.circuit, 'trial', node.trial, 'streak', 0,
  'opens', node.opens, 'tripped_at_ms', now, 'cause', node.cause,
  'cooling_until_ms', node.cooling_until_ms, 'since_ms', node.since_ms, 'bad', bad, 'seen', bad)
return {before, node.circuit}
