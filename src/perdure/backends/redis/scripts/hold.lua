-- id, whether to hold -> ok or missing
local id, held = take(), take()
local row = indexed(id)
if not row.status then
  return { 'missing' }
end
change(id, row, { held = held == '1' and '1' or NONE })
if held ~= '1' then
  tell()
end
return { 'ok' }
