-- queue, and its limits (concurrency, per_key and interval, each or nothing, with colons between) or '' to remove them
local queue, limits = take(), take()
if limits == '' then
  redis.call('HDEL', root .. ':limits', queue)
  redis.call('HDEL', root .. ':starts', queue)
else
  redis.call('HSET', root .. ':limits', queue, limits)
end
publish_change()
return { 'ok' }
