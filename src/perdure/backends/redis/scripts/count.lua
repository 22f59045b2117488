-- prefix, status or '', whether workflow is given, workflow -> how many runs
local prefix, status, has_workflow, workflow = take(), take(), take() == '1', take()

local function matches(workflow_, status_)
  return (status == '' or status_ == status) and (not has_workflow or workflow_ == workflow)
end

local number = 0
if prefix ~= '' then
  for _, id in ipairs(redis.call('ZRANGEBYLEX', root .. ':ids', '[' .. prefix, '(' .. prefix .. '\255')) do
    local row = columns_of(id, { 'workflow', 'status' })
    if matches(row.workflow, row.status) then
      number = number + 1
    end
  end
else
  for _, group in ipairs(list_groups()) do
    if matches(group[2][1], group[2][2]) then
      number = number + redis.call('ZCARD', group[1])
    end
  end
end
return number
