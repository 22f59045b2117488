-- now, id, whether to hold -> ok or missing
local now, id, held = take_now(), take(), take()
local row = indexed_columns(id)
if not row.status then
  return { 'missing' }
end
change_run(id, row, { held = held == '1' and '1' or NONE })
if held ~= '1' then
  wake_from_problem(id, now)
  publish_change()
end
return { 'ok' }
