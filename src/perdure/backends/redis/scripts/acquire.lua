-- now, id, ttl, token, owner, due_only -> ok and the whole run, nothing, missing, on hold or leased
local now, id, length, token, owner, due_only = take_now(), take(), tonumber(take()), take(), take(), take() == '1'

local row = indexed_columns(id)
if not row.status then
  return { 'missing' }
end
local held = columns_of(id, { 'token', 'lease_owner', 'input_hash' })
if held.token == token then
  return { 'ok', load_run(id) } -- the reply to this call was lost, and it was sent again
end
if ENDED[row.status] then
  return { 'nothing' }
end
if row.held == '1' then
  return { 'on hold' }
end
if is_leased(row, now) then
  return { 'leased', held.lease_owner or '' }
end
if held.input_hash == '' or (due_only and not is_due(row, now)) then
  return { 'nothing' }
end
if not take_room(row.queue, row.limit_key, not has_started(row), now) then
  return { 'nothing' }
end
lease_run(id, row, token, owner, length, now)
return { 'ok', load_run(id) }
