-- now, call, id, wake (never, due, now or given), columns, entries, inbox, dedupes -> ok or leased
local now, call, id, mode = take_now(), take(), take(), take()
local columns, entries, inbox, dedupes = take_list(), take_list(), take_list(), take_list()

if recall(call) then
  return { 'ok' }
end
local found = columns_of(id, { 'status', 'epoch', 'held', 'lease_until', 'lease_owner' })
if is_leased(found, now) then
  return { 'leased', found.lease_owner or '' }
end

local row = {}
for i = 1, #columns, 2 do
  row[columns[i]] = columns[i + 1]
end
row.epoch = next_epoch(found, now)
row.updated_at = int(now)
if found.status then
  row.held = found.held
end
if mode == 'never' then
  row.wake_at = nil
elseif mode == 'now' or (mode == 'due' and not is_due(row, now)) then
  row.wake_at = int(now)
end

local flat = {}
for name, value in pairs(row) do
  flat[#flat + 1] = name
  flat[#flat + 1] = value
end
delete_run(id)
insert_run(id, flat, entries, inbox, dedupes)
remember(call, '')
publish_change()
return { 'ok' }
