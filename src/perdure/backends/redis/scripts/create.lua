-- now, id, ttl or '', token, owner, created_at or '', columns, entries, inbox, dedupes -> new or found, and the whole run
-- A new run of a queue without limits is leased, if there is a ttl.
local now, id, length, token, owner, created_at = take_now(), take(), take(), take(), take(), take()
local columns, entries, inbox, dedupes = take_list(), take_list(), take_list(), take_list()

-- What a run that was restored without its input takes from the first `create`.
local LATE = {
  'workflow', 'input', 'input_hash', 'first_input_hash', 'definition_hash', 'queue', 'priority', 'limit_key', 'start_at', 'deadline',
}

local new = {}
for i = 1, #columns, 2 do
  new[columns[i]] = columns[i + 1]
end

local found = columns_of(id, { 'workflow', 'version', 'input_hash', 'status', 'cancel_requested', 'parent_id', 'call' })
if found.status then
  if found.call == token then
    return { 'new', load_run(id) } -- the reply to this call was lost, and it was sent again
  end
  if found.input_hash == '' and (found.workflow == '' or found.workflow == new.workflow) then
    local changes = { updated_at = int(now) }
    for _, name in ipairs(LATE) do
      changes[name] = new[name] or NONE
    end
    if found.version == '0' then
      changes.version = new.version
    end
    if not found.parent_id then
      changes.parent_id, changes.parent_key = new.parent_id or NONE, new.parent_key or NONE
    end
    if ENDED[found.status] then
      changes.wake_at = NONE
    elseif found.cancel_requested == '1' or not new.start_at then
      changes.wake_at = int(now)
    else
      changes.wake_at = new.start_at
    end
    change_run(id, indexed_columns(id), changes)
    publish_change()
  end
  return { 'found', { redis.call('HGETALL', key_of('run', id)) } }
end

local function with(name, value)
  columns[#columns + 1] = name
  columns[#columns + 1] = value
end

with('status', 'pending')
with('wake_at', new.start_at or int(now))
with('created_at', created_at ~= '' and created_at or int(now))
with('updated_at', int(now))
with('call', token)
insert_run(id, columns, entries, inbox, dedupes)
if length ~= '' and redis.call('HEXISTS', root .. ':limits', new.queue) == 0 then
  lease_run(id, indexed_columns(id), token, owner, tonumber(length), now)
end
publish_change()
return { 'new', load_run(id) }
