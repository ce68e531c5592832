#!lua _node
-- signal: keep what an engine says of itself on its own page; valid for a time.
--
-- KEYS[1] node      hash  the record
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] id        of the node
-- ARGV[4] epoch     that the observer knows; what was seen of an earlier life says nothing
-- ARGV[5] valid     ms
-- ARGV[6] waiting   requests in the engine's own queue
-- ARGV[7] running   requests that it runs
-- ARGV[8] used      share of its KV cache in use, in [0, 1]; '' = it does not say
-- ARGV[9] slots     requests that it runs at once; 0 = it does not say
-- ARGV[10] room     tokens that its KV cache has room for; 0 = it does not say
--
-- Returns 1, or 0 when the node is not known.

whole(4, 7)
whole(9, 10)
local used = tonumber(ARGV[8] == '' and '0' or ARGV[8])
demand(used and used >= 0 and used <= 1, 8)
local node, now = read(ARGV[3]), clock()
if not node or node.state == 'removed' or ARGV[4] ~= string.format('%d', node.epoch) then return 0 end
node.kv_used, node.signal_until_ms = used, now + tonumber(ARGV[5])
node.engine_slots, node.engine_kv_tokens = tonumber(ARGV[9]), tonumber(ARGV[10])
if POLICY == 'work' then
  node.row = row_of(node.id, now)
  limits_of(node)
  remember(node.id, node.row, now)
end
keep(node, active(node.id), now, 'engine_waiting', ARGV[6], 'engine_running', ARGV[7],
  'kv_used', ARGV[8], 'signal_until_ms', node.signal_until_ms, 'engine_slots', ARGV[9],
  'engine_kv_tokens', ARGV[10])
return 1
