-- id, after -> unconsumed rows
return redis.call('ZRANGEBYSCORE', key('inbox', take()), '(' .. take(), '+inf')
