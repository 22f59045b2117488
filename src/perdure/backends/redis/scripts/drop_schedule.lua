-- call, id -> how many were there
local call, id = take(), take()
if recall(call) then
  return 1
end
local dropped = redis.call('HDEL', root .. ':schedules', id)
if dropped == 1 then
  remember(call, '')
end
return dropped
