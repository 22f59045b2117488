-- now, call, id, epoch, token, status, outcome, entries, consume -> ok, lost or refused
local now, call, id, epoch, token, status, outcome = take_now(), take(), take(), take(), take(), take(), take()
local entries, consume = take_list(), take_list()
local row = columns_of(id, { 'call', 'parent_id', 'parent_key', 'problem' })
if row.call == call then
  return { 'ok' }
end
if not is_fenced(id, epoch, token) then
  return { 'lost' }
end
local refusal = write(id, entries, consume, {})
if refusal then
  return refusal
end
release_lease(id, indexed_columns(id), clear_problem(row, {
  status = status, outcome = outcome, wake_at = NONE, updated_at = int(now), call = call,
}))
if row.parent_id and row.parent_key then
  local parent = columns_of(row.parent_id, { 'status' }).status
  if parent and not ENDED[parent] then
    deliver(row.parent_id, 'child', row.parent_key, nil, outcome, now)
  end
  store_columns(id, { parent_notified = '1' })
end
publish_change()
return { 'ok' }
