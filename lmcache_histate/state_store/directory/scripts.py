"""What runs inside the server, so that each step is atomic and one round trip.

All keys of a namespace share a hash tag, so that a script may touch them in Redis Cluster too. `P` is `histate:<schema>:{tag}`:

    P:i             set of the numbers of all members that were not swept yet
    P:l:<number>    lease: token and member (`encoding.pack_member`); it expires by itself, which ends the membership
    P:w             hash, number -> last batch that was applied, so that a batch is applied once and in order
    P:x             hash, number -> statistics
    P:c:<bucket>    hash of chunk and session records, by field; small, so that the server packs it without an index
    P:f             stream of changes: entry <seq>-0 holds the records that one batch changed, as they were after it
    P:m             hash: incarnation (random), seq of the last entry, and how far renewing and sweeping went

Leases are keys that expire, so only the server's clock counts, and renewing one works on a server that is out of memory. A
script that would add data begins with a command that such a server refuses, so it is refused as a whole.

A record counts for a number only while its lease exists. Numbers are drawn at random by those who register, so that what
an unknown member left can never be taken for somebody else's.
"""

from __future__ import annotations

BUCKETS = 1 << 14
"""Record hashes per namespace. One million records make 61 a bucket; up to 128 (Redis's default for
`hash-max-listpack-entries`), that is two million, a bucket is one packed string."""
FEED_ENTRIES = 512
"""Entries of the feed, each of one batch, that views can catch up on; one that was away for longer reads everything anew. The
scripts have both numbers written out."""

_COMMON = """
local P = KEYS[1]
local call, sub, byte, char = redis.call, string.sub, string.byte, string.char

local function bucket(hash)
  local a, b = byte(hash, 2, 3)
  return P .. ':c:' .. (((a or 0) * 256 + (b or 0)) % 16384)
end

-- Several times as fast as struct.pack, which is called for every record.
local function u16(number)
  return char(number % 256, math.floor(number / 256))
end

local function packed(number)
  return struct.pack('<I4', tonumber(number))
end

-- Leases of the members, by packed number; and the numbers whose lease is gone.
local function members()
  local live, gone = {}, {}
  for _, number in ipairs(call('SMEMBERS', P .. ':i')) do
    local lease = call('GET', P .. ':l:' .. number)
    if lease then live[packed(number)] = lease else gone[#gone + 1] = number end
  end
  return live, gone
end

local function lengthen(key, ms)
  local left = call('PTTL', key)
  if left ~= -2 and left < ms * 0.75 then call('PEXPIRE', key, ms) end
end

local function name_of(lease)
  return sub(lease, 13, 12 + byte(lease, 10))
end

local function forget(number)
  call('SREM', P .. ':i', number)
  call('DEL', P .. ':l:' .. number)
  call('HDEL', P .. ':w', number)
  call('HDEL', P .. ':x', number)
  call('HSET', P .. ':m', 'sweep', 16384)
end

-- Appends news to the feed; returns the entry's seq.
local function tell(news, ttl)
  local seq = call('HINCRBY', P .. ':m', 'seq', 1)
  call('XADD', P .. ':f', 'MAXLEN', '~', 512, seq .. '-0', 'r', table.concat(news))
  lengthen(P .. ':f', ttl)
  return seq
end

local function server_ms()
  local time = call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
"""

REGISTER = (
    _COMMON
    + """
-- ARGV: number, token, member, lease ms, ttl ms, incarnation, '1' for the first time in this process,
--       tier's number, tier or '', tier's ttl ms
local live = members()
local name, same, claimed, tier = name_of(ARGV[3]), {}, false, nil
for number, lease in pairs(live) do
  if name_of(lease) == name then
    same[#same + 1] = struct.unpack('<I4', number)
    if sub(lease, 1, 8) ~= ARGV[2] then claimed = true end
  end
  if ARGV[9] ~= '' and name_of(lease) == name_of(ARGV[9]) then tier = tostring(struct.unpack('<I4', number)) end
end
if claimed and ARGV[7] ~= '1' then return {'claimed'} end
if live[packed(ARGV[1])] or live[packed(ARGV[8])] then return {'retry'} end
call('HSETNX', P .. ':m', 'incarnation', ARGV[6])
for _, number in ipairs(same) do forget(tostring(number)) end
call('SET', P .. ':l:' .. ARGV[1], ARGV[3], 'PX', ARGV[4])
call('SADD', P .. ':i', ARGV[1])
if ARGV[9] ~= '' and not tier then
  tier = ARGV[8]
  call('SADD', P .. ':i', tier)
  call('SET', P .. ':l:' .. tier, ARGV[9], 'PX', ARGV[10])
end
for _, part in ipairs({':i', ':m'}) do lengthen(P .. part, 2 * tonumber(ARGV[5])) end
return {'ok', claimed and 1 or 0, tier or ''}
"""
)

PUBLISH = (
    _COMMON
    + """
-- ARGV: number, token, batch, ttl ms, tier's number or '', changes, statistics or ''
local lease = call('GET', P .. ':l:' .. ARGV[1])
if not lease or sub(lease, 1, 8) ~= ARGV[2] then return 'lost' end
local last = call('HGET', P .. ':w', ARGV[1])
if last and tonumber(ARGV[3]) <= tonumber(last) then return 'again' end
call('HSET', P .. ':w', ARGV[1], ARGV[3])
local live = members()
local mine, tier = packed(ARGV[1]), ARGV[5] ~= '' and packed(ARGV[5]) or ''
local ttl, changes, at = tonumber(ARGV[4]), ARGV[6], 1
local news, unplaced, no_hit = {}, string.rep(char(0), 4), string.rep(char(0), 14)
local now48

local function put(key, field, record)
  call('HSET', key, field, record)
  lengthen(key, ttl)
  news[#news + 1] = u16(#field) .. u16(#record) .. field .. record
end

local function drop(key, field)
  if call('HDEL', key, field) == 1 then news[#news + 1] = u16(#field) .. u16(0) .. field end
end

local function known(key, field)
  local record = call('HGET', key, field)
  if record and byte(record, 1) == 1 then return record end
end

-- What a dead member said of a session is void.
local function session(key, hash)
  local record = known(key, 's' .. hash)
  if record and live[sub(record, 6, 9)] then return record end
end

while at <= #changes do
  local kind, size = byte(changes, at, at + 1)
  local hash = sub(changes, at + 2, at + 1 + size)
  at = at + 2 + size
  local key = bucket(hash)
  if kind == 1 then
    local held, added, removed = byte(changes, at, at + 2)
    local length = byte(changes, at + 7)
    local head = sub(changes, at + 3, at + 7 + length)
    local old, holders, shared = known(key, 'c' .. hash), {}, 0
    if old then
      local first = 7 + byte(old, 6)
      if sub(head, 1, 4) == unplaced then head = sub(old, 2, first - 1) end
      for i = first, #old, 5 do
        local number = sub(old, i, i + 3)
        if number == tier then shared = byte(old, i + 4)
        elseif number ~= mine and live[number] then holders[#holders + 1] = sub(old, i, i + 4) end
      end
    end
    at = at + 8 + length
    if held > 0 then holders[#holders + 1] = mine .. char(held) end
    shared = bit.band(bit.bor(shared, added), bit.bnot(removed))
    if shared > 0 and tier ~= '' then holders[#holders + 1] = tier .. char(shared) end
    if #holders > 0 then
      put(key, 'c' .. hash, char(1) .. head .. table.concat(holders))
    else
      drop(key, 'c' .. hash)
      drop(key, 's' .. hash)  -- a session goes with the chunk that names it
    end
  elseif kind == 2 then
    local position, length = sub(changes, at, at + 3), byte(changes, at + 4)
    local previous = sub(changes, at + 5, at + 4 + length)
    at = at + 5 + length
    if length > 0 and previous ~= hash then
      local before = bucket(previous)
      local old = session(before, previous)
      local head = old and sub(old, 1, 5) or char(1) .. unplaced
      put(before, 's' .. previous, head .. mine .. (old and sub(old, 10, 23) or no_hit) .. hash)
    end
    local old = session(key, hash)
    put(key, 's' .. hash, char(1) .. position .. mine .. (old and sub(old, 10, 23) or no_hit))
  else
    local position = sub(changes, at, at + 3)
    at = at + 4
    local old = session(key, hash)
    if old then
      now48 = now48 or sub(struct.pack('<I8', server_ms()), 1, 6)
      put(key, 's' .. hash, sub(old, 1, 9) .. position .. mine .. now48 .. sub(old, 24))
    end
  end
end
if ARGV[7] ~= '' then call('HSET', P .. ':x', ARGV[1], ARGV[7]) end
if #news > 0 then tell(news, ttl) end
return 'ok'
"""
)

POLL = (
    _COMMON
    + """
-- Takes out of a bucket what only numbers without a lease said, and sessions whose chunk nobody holds. Views find out the
-- former by themselves; of the latter there is news. Returns the number of records looked at.
local function clean(key, live, news)
  local all, kept = call('HGETALL', key), {}
  for i = 1, #all, 2 do
    local field, record = all[i], all[i + 1]
    if byte(field) == 99 then
      local first, holders, count = 7 + (byte(record, 6) or 0), {}, 0
      for j = first, #record, 5 do
        count = count + 1
        if live[sub(record, j, j + 3)] then holders[#holders + 1] = sub(record, j, j + 4) end
      end
      if #holders == 0 or byte(record) ~= 1 then
        call('HDEL', key, field)
      else
        kept[sub(field, 2)] = true
        if #holders < count then call('HSET', key, field, sub(record, 1, first - 1) .. table.concat(holders)) end
      end
    end
  end
  for i = 1, #all, 2 do
    local field = all[i]
    if byte(field) == 115 and not (kept[sub(field, 2)] and live[sub(all[i + 1], 6, 9)]) then
      call('HDEL', key, field)
      news[#news + 1] = u16(#field) .. u16(0) .. field
    end
  end
  return #all / 2
end

-- ARGV: number or '', token, lease ms, ttl ms, known incarnation, known seq, entries at most, tier's number or '',
--       tier's ttl ms
local status = 'ok'
if ARGV[1] ~= '' then
  local lease = call('GET', P .. ':l:' .. ARGV[1])
  if lease and sub(lease, 1, 8) == ARGV[2] then
    call('PEXPIRE', P .. ':l:' .. ARGV[1], ARGV[3])
    if ARGV[8] ~= '' then lengthen(P .. ':l:' .. ARGV[8], tonumber(ARGV[9])) end
    for _, part in ipairs({':i', ':m', ':w', ':x', ':f'}) do lengthen(P .. part, 2 * tonumber(ARGV[4])) end
  else
    status = 'lost'
  end
end
local live, gone = members()
local now = server_ms()
local meta = call('HMGET', P .. ':m', 'incarnation', 'seq', 'cursor', 'started', 'sweep', 'rounds')

-- Upkeep: everyone who has a lease does what is due and says how far it went.
if ARGV[1] ~= '' and status == 'ok' then
  for _, number in ipairs(gone) do forget(number) end
  local cursor, started = tonumber(meta[3] or '0'), tonumber(meta[4] or '0')
  local rounds, sweep = tonumber(meta[6] or '0'), #gone > 0 and 16384 or tonumber(meta[5] or '0')
  local half = tonumber(ARGV[3]) / 2
  local before = {cursor, started, sweep}

  -- Renewing: all buckets within half a lease, so that none expires while a record in it counts.
  if started == 0 or started > now then started = now end
  if cursor >= 16384 and now - started >= half then
    cursor, started, rounds = 0, now, rounds + 1
    if rounds % 64 == 0 then sweep = 16384 end
  end
  local due = math.min(16384, math.ceil(16384 * (now - started) / half), cursor + 4096)
  while cursor < due do
    lengthen(P .. ':c:' .. cursor, tonumber(ARGV[4]))
    cursor = cursor + 1
  end

  -- Sweeping: after a member went, some thousand records at a time.
  local budget, news = 4096, {}
  while sweep > 0 and budget > 0 do
    sweep = sweep - 1
    budget = budget - 4 - clean(P .. ':c:' .. sweep, live, news)
  end
  if #news > 0 then
    meta[2] = tell(news, tonumber(ARGV[4]))
  end
  if cursor ~= before[1] or started ~= before[2] or sweep ~= before[3] then
    call('HSET', P .. ':m', 'cursor', cursor, 'started', started, 'sweep', sweep, 'rounds', rounds)
  end
end

local leases = {}
for number, lease in pairs(live) do
  local plain = tostring(struct.unpack('<I4', number))
  leases[#leases + 1] = plain
  leases[#leases + 1] = lease
  leases[#leases + 1] = call('PTTL', P .. ':l:' .. plain)
  leases[#leases + 1] = call('HGET', P .. ':x', plain) or ''
end
local entries = {}
local seq = tonumber(meta[2] or '0')
if meta[1] and meta[1] == ARGV[5] and seq > tonumber(ARGV[6]) then
  local range = call('XRANGE', P .. ':f', (tonumber(ARGV[6]) + 1) .. '-0', '+', 'COUNT', ARGV[7])
  for _, entry in ipairs(range) do
    entries[#entries + 1] = string.match(entry[1], '^%d+')
    entries[#entries + 1] = entry[2][2]
  end
end
return {status, meta[1] or '', tostring(seq), tostring(now), leases, entries}
"""
)

SCAN = (
    _COMMON
    + """
-- ARGV: first bucket, records at most. Returns the next bucket and fields with records.
local at, found = tonumber(ARGV[1]), {}
local stop = math.min(16384, at + 4096)
while at < stop and #found < 2 * tonumber(ARGV[2]) do
  local all = call('HGETALL', P .. ':c:' .. at)
  for i = 1, #all do found[#found + 1] = all[i] end
  at = at + 1
end
return {at, found}
"""
)

LOOKUP = (
    _COMMON
    + """
-- ARGV: chunk hashes, each after its length (u8). Returns numbers and leases of the members, and the records, each after its
-- length (u16), which is 0 for none. One string each way, since a client takes longer over many than the server over all.
local leases, records = {}, {}
for number, lease in pairs((members())) do
  leases[#leases + 1] = tostring(struct.unpack('<I4', number))
  leases[#leases + 1] = lease
end
local hashes, at = ARGV[1], 1
while at <= #hashes do
  local size = byte(hashes, at)
  local hash = sub(hashes, at + 1, at + size)
  at = at + 1 + size
  local record = call('HGET', bucket(hash), 'c' .. hash) or ''
  records[#records + 1] = u16(#record) .. record
end
return {leases, table.concat(records)}
"""
)

WITHDRAW = (
    _COMMON
    + """
-- ARGV: number, token. Ends a lease; what is left of it is swept by the others.
local lease = call('GET', P .. ':l:' .. ARGV[1])
if lease and sub(lease, 1, 8) == ARGV[2] then call('DEL', P .. ':l:' .. ARGV[1]) end
return 'ok'
"""
)
