-- id, whether to hold -> ok or missing
local id, held = take(), take()
local row = indexed_columns(id)
if not row.status then
  return { 'missing' }
end
change_run(id, row, { held = held == '1' and '1' or NONE })
if held ~= '1' then
  publish_change()
end
return { 'ok' }
