-- id, after -> entries
return redis.call('ZRANGEBYSCORE', key('steps', take()), '(' .. take(), '+inf')
