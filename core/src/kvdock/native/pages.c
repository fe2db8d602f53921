/* Pages, many in one call: read or write them, and hash each while its bytes are in
 * the processor's cache. The interpreter's lock is not held meanwhile. And the index of a
 * page store: find pages, and insert records. Everything here has a twin in Python, which also takes what this leaves: errors, short reads,
 * memory that does not suit direct I/O, and objects under 241 bytes. The hash is XXH3
 * of 64 bits without a seed, as its specification describes it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define EXPORT __attribute__((visibility("default")))
#define LEFT INT32_MIN   /* the error of a row that Python moves */
#define BUFFERS 1024     /* most pieces of one system call */
#define MEMORY_BLOCK 512 /* of direct I/O, for addresses and sizes of memory */
#define TMPFS 0x01021994 /* a file system in memory, as statfs tells it */
#define AHEAD 2048       /* bytes that are fetched before they are hashed */
#define STRIPE 64
#define STRIPES_PER_BLOCK 16
#define LONG 241         /* least bytes of an object that is hashed by stripes */
#define PRIME_32 0x9E3779B1u
#define PRIME_64 0x9E3779B185EBCA87u
#define SECRET ((const uint8_t *)WORDS)
#define LAST_KEY (SECRET + (int)sizeof WORDS - STRIPE)

static const uint64_t WORDS[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

typedef uint64_t __attribute__((aligned(1), may_alias)) Word;
#define WORD(at) (*(const Word *)(at))

/* XXH3's loop over stripes of 64 bytes, in registers of WIDTH bytes. `key` is where the first
 * stripe's part of the secret begins, `left` the stripes to the end of a block, where the sums
 * are scrambled. They stay in registers all the time: a load of 64 bytes that were stored as
 * words has to wait for them. MULTIPLY takes the low halves of its lanes, in one instruction,
 * of which compilers make several in plain C. SWAP exchanges neighbours. */
#define HASH_LOOP(NAME, WIDTH, TARGET, MULTIPLY, SWAP)                                      \
  TARGET static void NAME(uint64_t *sums, const uint8_t *data, const uint8_t *key,          \
                          int64_t left, int64_t n) {                                        \
    typedef uint64_t Vector __attribute__((vector_size(WIDTH)));                            \
    typedef Vector __attribute__((aligned(1), may_alias)) Unaligned;                        \
    enum { VECTORS = STRIPE / WIDTH };                                                      \
    const Vector prime = PRIME_32 - (Vector){0};                                            \
    Vector lanes[VECTORS];                                                                  \
    for (int i = 0; i < VECTORS; i++) lanes[i] = ((const Unaligned *)sums)[i];              \
    while (n) {                                                                             \
      const int64_t some = MIN(n, left);                                                    \
      _Pragma("GCC unroll 4") for (int64_t s = 0; s < some; s++) {                          \
        const uint8_t *stripe = data + s * STRIPE;                                          \
        /* A number, as it may be behind the object. */                                     \
        __builtin_prefetch((const void *)((uintptr_t)stripe + AHEAD));                      \
        for (int i = 0; i < VECTORS; i++) {                                                 \
          Vector value = ((const Unaligned *)stripe)[i];                                    \
          LOADED(value);                                                                    \
          Vector mixed = value ^ ((const Unaligned *)(key + 8 * s))[i];                     \
          lanes[i] += (Vector)SWAP(value) + (Vector)MULTIPLY(mixed, mixed >> 32);           \
        }                                                                                   \
      }                                                                                     \
      n -= some, data += some * STRIPE;                                                     \
      if (some < left) break;                                                               \
      key = SECRET, left = STRIPES_PER_BLOCK;                                               \
      for (int i = 0; i < VECTORS; i++) {                                                   \
        Vector lane = lanes[i] ^ (lanes[i] >> 47) ^ ((const Unaligned *)LAST_KEY)[i];       \
        Vector high = (Vector)MULTIPLY(lane >> 32, prime);                                  \
        lanes[i] = (Vector)MULTIPLY(lane, prime) + (high << 32);                            \
      }                                                                                     \
    }                                                                                       \
    for (int i = 0; i < VECTORS; i++) ((Unaligned *)sums)[i] = lanes[i];                    \
  }

#if defined(__x86_64__)
/* Without it gcc loads each stripe once for each use, which takes a quarter longer. */
#define LOADED(vector) __asm__("" : "+v"(vector))
#define MULTIPLY_64(a, b) _mm512_mul_epu32((__m512i)(a), (__m512i)(b))
#define MULTIPLY_32(a, b) _mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#define MULTIPLY_16(a, b) _mm_mul_epu32((__m128i)(a), (__m128i)(b))
#define SWAP_64(vector) _mm512_shuffle_epi32((__m512i)(vector), 0x4e)
#define SWAP_32(vector) _mm256_shuffle_epi32((__m256i)(vector), 0x4e)
#define SWAP_16(vector) _mm_shuffle_epi32((__m128i)(vector), 0x4e)
HASH_LOOP(add_by_64, 64, __attribute__((target("avx512f"))), MULTIPLY_64, SWAP_64)
HASH_LOOP(add_by_32, 32, __attribute__((target("avx2"))), MULTIPLY_32, SWAP_32)
#elif defined(__ARM_NEON)
#define LOADED(vector)
#define MULTIPLY_16(a, b) vmull_u32(vmovn_u64(a), vmovn_u64(b))
#define SWAP_16(vector) vextq_u64(vector, vector, 1)
#else
#define LOADED(vector)
#define MULTIPLY_16(a, b) (((a)&UINT32_MAX) * ((b)&UINT32_MAX))
#define SWAP_16(vector) ((Vector){(vector)[1], (vector)[0]})
#endif
HASH_LOOP(add_by_16, 16, , MULTIPLY_16, SWAP_16)

/* The width that is used; tests and benchmarks set others. */
EXPORT int64_t kvdock_register_bytes = 16;

#if defined(__x86_64__)
/* When the library is loaded, but not by the loader (ifunc): musl's cannot. */
__attribute__((constructor)) static void choose_registers(void) {
  __builtin_cpu_init();
  kvdock_register_bytes = __builtin_cpu_supports("avx512f") ? 64
                          : __builtin_cpu_supports("avx2")  ? 32
                                                            : 16;
}
#endif

static void add_stripes(uint64_t *sums, const uint8_t *data, const uint8_t *key, int64_t left,
                        int64_t n) {
#if defined(__x86_64__)
  if (kvdock_register_bytes == 64)
    add_by_64(sums, data, key, left, n);
  else if (kvdock_register_bytes == 32)
    add_by_32(sums, data, key, left, n);
  else
#endif
    add_by_16(sums, data, key, left, n);
}

/* One object under way: its pieces arrive in order, cut anywhere. */
typedef struct {
  uint64_t sums[8];
  uint64_t total;
  int64_t stripes;  /* still to add; the last bytes make one more, see `digest` */
  int within;       /* stripes of the block that is under way */
  int held;         /* bytes of a stripe that two pieces share */
  uint8_t shared[STRIPE];
} State;

static void begin(State *state, uint64_t total) {
  *state = (State){{0xC2B2AE3Du, PRIME_64, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u,
                    0x85EBCA77C2B2AE63u, 0x85EBCA77u, 0x27D4EB2F165667C5u, PRIME_32},
                   .total = total, .stripes = (int64_t)((total - 1) / STRIPE)};
}

static void add(State *state, const uint8_t *at, int64_t n) {
  n = MIN(n, state->stripes), state->stripes -= n;
  add_stripes(state->sums, at, SECRET + 8 * state->within,
              STRIPES_PER_BLOCK - state->within, n);
  state->within = (int)((state->within + n) % STRIPES_PER_BLOCK);
}

static void update(State *state, const uint8_t *at, int64_t size) {
  if (state->held) {
    int64_t some = MIN(STRIPE - state->held, size);
    memcpy(state->shared + state->held, at, (size_t)some);
    state->held += (int)some;
    at += some, size -= some;
    if (state->held < STRIPE) return;
    add(state, state->shared, 1);
    state->held = 0;
  }
  add(state, at, size / STRIPE);
  state->held = (int)(size % STRIPE);
  memcpy(state->shared, at + size - state->held, (size_t)state->held);
}

static uint64_t fold(uint64_t a, uint64_t b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* The pieces are looked at again: the last 64 bytes may lie in several. */
static uint64_t digest(State *state, const int64_t *addresses, const int64_t *sizes,
                       int64_t pieces) {
  uint8_t last[STRIPE];
  for (int64_t missing = STRIPE, i = pieces - 1; missing && i >= 0; i--) {
    int64_t some = MIN(sizes[i], missing);
    missing -= some;
    memcpy(last + missing, (const uint8_t *)addresses[i] + sizes[i] - some, (size_t)some);
  }
  add_stripes(state->sums, last, LAST_KEY - 7, STRIPES_PER_BLOCK, 1);
  uint64_t hash = state->total * PRIME_64;
  for (int i = 0; i < 8; i += 2)
    hash += fold(state->sums[i] ^ WORD(SECRET + 11 + 8 * i),
                 state->sums[i + 1] ^ WORD(SECRET + 19 + 8 * i));
  hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9u;
  return hash ^ (hash >> 32);
}

static int64_t sum(const int64_t *sizes, int64_t pieces) {
  int64_t total = 0;
  for (int64_t i = 0; i < pieces; i++) total += sizes[i];
  return total;
}

static uint64_t hash_row(const int64_t *addresses, const int64_t *sizes, int64_t pieces) {
  State state;
  begin(&state, (uint64_t)sum(sizes, pieces));
  for (int64_t i = 0; i < pieces; i++) update(&state, (const uint8_t *)addresses[i], sizes[i]);
  return digest(&state, addresses, sizes, pieces);
}

/* Hash objects; return how many: fewer than count if the next one is too short. Row r
 * has its addresses at r * pieces, and its sizes at r * stride. */
EXPORT int64_t kvdock_hash(int64_t count, int64_t pieces, int64_t stride,
                           const int64_t *addresses, const int64_t *sizes, uint64_t *sums) {
  for (int64_t row = 0; row < count; row++, addresses += pieces, sizes += stride) {
    if (sum(sizes, pieces) < LONG) return row;
    sums[row] = hash_row(addresses, sizes, pieces);
  }
  return count;
}

EXPORT const int64_t kvdock_version = 5; /* of all arguments, and of the words of structs */

/* What is moved, in words of 8 bytes: Python's Movement says what each is. */
typedef struct {
  int64_t write, pieces, stride, granule, block, flags, deadline_ns;
  const int64_t *order, *files, *offsets, *addresses, *sizes;
  const uint64_t *expected;
  uint64_t *sums;
  int64_t *nbytes;
  int32_t *errors;
} Move;

/* Parts of memory for one system call. */
typedef struct {
  int count;
  int64_t bytes;
  struct iovec of[BUFFERS];
} Parts;

static void append(Parts *parts, int64_t address, int64_t size) {
  if (size) parts->of[parts->count++] = (struct iovec){(void *)address, (size_t)size};
  parts->bytes += size;
}

static int call(const Move *m, int64_t file, int64_t offset, const Parts *parts) {
  if (m->block) {
    if (parts->bytes % m->block) return 0;
    for (int i = 0; i < parts->count; i++)
      if (((uintptr_t)parts->of[i].iov_base | parts->of[i].iov_len) % MEMORY_BLOCK) return 0;
  }
  if (m->write) return pwritev((int)file, parts->of, parts->count, offset) == parts->bytes;
  errno = EOPNOTSUPP;
  /* Not the C library's preadv2, which old ones do not have. */
  ssize_t done = m->flags ? syscall(SYS_preadv2, (int)file, parts->of, parts->count, offset,
                                    0L, m->flags) : -1;
  if (done < 0 && errno == EOPNOTSUPP) done = preadv((int)file, parts->of, parts->count, offset);
  return done == parts->bytes;
}

/* Move one object of more than a granule, or of more pieces than one call takes. */
static int move_large(const Move *m, int64_t row, int64_t total) {
  const int64_t *addresses = m->addresses + row * m->pieces;
  const int64_t *sizes = m->sizes + row * m->stride;
  Parts parts;
  State state;
  begin(&state, (uint64_t)total);
  for (int64_t piece = 0, within = 0, done = 0; done < total;) {
    parts.count = 0, parts.bytes = 0;
    while (piece < m->pieces && parts.bytes < m->granule && parts.count < BUFFERS) {
      int64_t some = MIN(sizes[piece] - within, m->granule - parts.bytes);
      append(&parts, addresses[piece] + within, some);
      within += some;
      if (within == sizes[piece]) piece++, within = 0;
    }
    for (int pass = 0; pass < 2; pass++) /* hash, then write; or read, then hash */
      if (pass == !m->write)
        for (int i = 0; i < parts.count && m->write < 2; i++)
          update(&state, parts.of[i].iov_base, (int64_t)parts.of[i].iov_len);
      else if (!call(m, m->files[row], m->offsets[row] + done, &parts))
        return 0;
    done += parts.bytes;
  }
  if (m->write < 2) m->sums[row] = digest(&state, addresses, sizes, m->pieces);
  return 1;
}

/* Hash rows for a Move whose `write` is 2: it writes them as they were hashed before. */
EXPORT void kvdock_hash_rows(const Move *m, int64_t first, int64_t stop) {
  for (; first < stop; first++) {
    int64_t row = m->order[first];
    const int64_t *sizes = m->sizes + row * m->stride;
    if (sum(sizes, m->pieces) < LONG) m->errors[row] = LEFT;
    else m->sums[row] = hash_row(m->addresses + row * m->pieces, sizes, m->pieces);
  }
}

/* Leave rows of several calls, and those whose last byte is not in the page cache: reading
 * them would have the file system read ahead, which may wait for a disk that hangs. Files
 * in memory have no cache to ask, and no disk. */
EXPORT void kvdock_leave_uncached(const Move *m, int64_t first, int64_t stop) {
  for (; first < stop; first++) {
    int64_t row = m->order[first], size = sum(m->sizes + row * m->stride, m->pieces);
    char byte;
    struct iovec one = {&byte, 1};
    struct statfs system;
    int file = (int)m->files[row];
    int64_t at = m->offsets[row] + size - 1;
    int cached = syscall(SYS_preadv2, file, &one, 1, at, 0L, m->flags) == 1 ||
                 (errno == EOPNOTSUPP && !fstatfs(file, &system) && system.f_type == TMPFS);
    if (!cached || size > m->granule) m->errors[row] = LEFT;
  }
}

/* Say how rows went; what must not stay in memory is zeroed. */
static void finish(const Move *m, int64_t first, int64_t stop, int right) {
  for (int64_t at = first; at < stop; at++) {
    int64_t row = m->order[at];
    const int64_t *sizes = m->sizes + row * m->stride;
    m->errors[row] = right ? 0 : LEFT;
    m->nbytes[row] = right ? sum(sizes, m->pieces) : 0;
    if (m->expected && !m->write && (!right || m->sums[row] != m->expected[row]))
      for (int64_t i = 0; i < m->pieces; i++)
        memset((void *)m->addresses[row * m->pieces + i], 0, (size_t)sizes[i]);
  }
}

/* Move the run of adjacent objects that begins at `first`; return the row behind it. */
static int64_t move_run(const Move *m, int64_t first, int64_t stop) {
  int64_t row = m->order[first], file = m->files[row], offset = m->offsets[row];
  int64_t last = first, total = sum(m->sizes + row * m->stride, m->pieces);
  Parts parts;
  parts.count = 0, parts.bytes = 0;
  if (m->errors[row] == LEFT) return first + 1;
  if (total < LONG || total > m->granule || m->pieces > BUFFERS)
    return finish(m, first, first + 1, total >= LONG && move_large(m, row, total)), first + 1;
  while (total >= LONG && parts.bytes + total <= m->granule &&
         parts.count + m->pieces <= BUFFERS && m->files[row] == file &&
         m->offsets[row] == offset + parts.bytes && m->errors[row] != LEFT) {
    for (int64_t i = 0; i < m->pieces; i++)
      append(&parts, m->addresses[row * m->pieces + i], m->sizes[row * m->stride + i]);
    if (++last == stop) break;
    row = m->order[last];
    total = sum(m->sizes + row * m->stride, m->pieces);
  }
  if (m->write == 1) kvdock_hash_rows(m, first, last);
  int right = call(m, file, offset, &parts);
  if (right && !m->write) kvdock_hash_rows(m, first, last);
  return finish(m, first, last, right), last;
}

/* Move the rows from first to stop, in `order`, until it is too late: those that remain
 * keep the error that they came with. Any number of threads may move rows of one Move. */
EXPORT void kvdock_move(const Move *m, int64_t first, int64_t stop) {
  while (first < stop) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if ((int64_t)now.tv_sec * 1000000000 + now.tv_nsec >= m->deadline_ns) return;
    first = move_run(m, first, stop);
  }
}

/* ---- The index of a page store -----------------------------------------------------------
 * A call of up to PAGES pages in three steps, each with the interpreter's lock, as it takes
 * microseconds: `look` finds the pages, `plan` or `place_in_slots` says where their bytes go,
 * and `record` and `insert` make what was written visible. Between them bytes are moved, without
 * that lock. A step that meets what is not usual says so and has changed nothing. */

#define LANES 8            /* of a bucket of the hash table */
#define ROW 0xFFFFFFFFu    /* of a lane: the number of a row, plus 1; above it a tag */
#define TOMB ROW           /* a lane whose key is gone; behind it others may follow */
#define ABSENT -1
#define RECORD_WORDS 8
enum { LOW, HIGH, CHECKSUM, TIMES, STORED, SEGMENT, PLACE, CHECK }; /* words of a record */
#define SLOT_SHIFT 48      /* of PLACE; its lower half is the tenant */
#define EXPIRY 0xFFFFFFFFu /* of TIMES */
#define SALT (0x6B76646F636B0000u + 2)
#define MIX 0xBF58476D1CE4E5B9u

static const uint64_t FACTORS[CHECK] = {
    0x9E6C63D0976B2D1B, 0xD1342543DE82EF95, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB,
    0x8EBC6AF09C88C6E3, 0x589965CC75374CC3, 0x1D8E4E27C47D124F,
};

/* Where the index is: Python's Index keeps it up to date. */
typedef struct {
  uint64_t *lanes;
  int64_t buckets;
  uint64_t *words;
  int64_t rows;
  int64_t *used_ns;
  const int32_t *segment_of;
} Index;

/* What one call has of its own: Python's CallArrays says what each is. */
typedef struct {
  int64_t *rows, *stored_ns, *used_ns, *segments, *slot_bytes, *slots;
  int64_t *order, *file_of, *offsets;
  const int64_t *tokens;
  int64_t *files;
  uint64_t *expected, *sums, *records;
  int32_t *errors;
} Call;

/* The row of a key, or ABSENT. */
static int64_t find(const Index *index, uint64_t low, uint64_t high) {
  const uint64_t mask = (uint64_t)index->buckets - 1;
  for (uint64_t bucket = low & mask;; bucket = (bucket + 1) & mask) {
    const uint64_t *line = index->lanes + bucket * LANES;
    int empty = 0;
    for (int lane = 0; lane < LANES; lane++) {
      const int64_t row = (int64_t)(line[lane] & ROW) - 1;
      empty |= !line[lane];
      if (line[lane] >> 32 == high >> 32 && row >= 0 && row < index->rows) {
        const uint64_t *words = index->words + row * RECORD_WORDS;
        if (words[LOW] == low && words[HIGH] == high) return row;
      }
    }
    if (empty) return ABSENT;
  }
}

/* Find keys by their digests, two words each; return how many are in the index. */
EXPORT int64_t kvdock_find(const Index *index, const uint64_t *digests, int64_t count,
                           int64_t *rows) {
  const uint64_t mask = (uint64_t)index->buckets - 1;
  int64_t known = 0;
  for (int64_t i = 0; i < count; i++)
    __builtin_prefetch(index->lanes + (digests[2 * i] & mask) * LANES);
  for (int64_t i = 0; i < count; i++) {
    rows[i] = find(index, digests[2 * i], digests[2 * i + 1]);
    known += rows[i] != ABSENT;
  }
  return known;
}

/* Whether two digests have the same first word, which keys of one batch hardly have. */
static int repeats(const uint64_t *digests, int64_t count) {
  for (int64_t i = 1; i < count; i++)
    for (int64_t k = 0; k < i; k++)
      if (digests[2 * i] == digests[2 * k]) return 1;
  return 0;
}

/* Look pages up. Return 0 if none is there and all are different; else in how many segments
 * they all are, with their numbers in `segments`; ABSENT in all other cases. Pages that
 * expire are such a case. */
EXPORT int64_t kvdock_look(const Index *index, const Call *c, const uint64_t *digests,
                           int64_t count) {
  const int64_t known = kvdock_find(index, digests, count, c->rows);
  int64_t segments = 0, last = 0;
  if (!known) return repeats(digests, count) ? ABSENT : 0;
  if (known < count) return ABSENT;
  for (int64_t i = 0; i < count; i++) {
    const int64_t number = index->segment_of[c->rows[i]];
    if (index->words[c->rows[i] * RECORD_WORDS + TIMES] & EXPIRY) return ABSENT;
    if (!segments || c->segments[last] != number)
      for (last = 0; last < segments && c->segments[last] != number;) last++;
    if (last == segments) c->segments[segments++] = number;
    c->file_of[i] = last;
  }
  return segments;
}

/* Sort the places of pages, by file and offset. Nearly always they are in order. */
static void sort(const Call *c, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    int64_t at = i;
    for (; at; at--) {
      const int64_t before = c->order[at - 1];
      if (c->file_of[before] < c->file_of[i] ||
          (c->file_of[before] == c->file_of[i] && c->offsets[before] <= c->offsets[i])) break;
      c->order[at] = before;
    }
    c->order[at] = i;
    c->files[i] = c->tokens[c->file_of[i]];
    c->errors[i] = ETIMEDOUT;
  }
}

/* Say where pages that `look` has found lie, and note that they are used, the first one last.
 * The times of before are left in `stored_ns` and `used_ns`. */
EXPORT void kvdock_plan(const Index *index, const Call *c, int64_t count, int64_t first_ns) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = c->rows[i];
    const uint64_t *words = index->words + row * RECORD_WORDS;
    c->offsets[i] = (int64_t)(words[PLACE] >> SLOT_SHIFT) * c->slot_bytes[c->file_of[i]];
    c->expected[i] = words[CHECKSUM];
    c->stored_ns[i] = (int64_t)words[STORED];
    c->used_ns[i] = index->used_ns[row];
    index->used_ns[row] = first_ns - i;
  }
  sort(c, count);
}

/* Say where pages go that have got `slots` of the first segment. */
EXPORT void kvdock_place_in_slots(const Call *c, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    c->file_of[i] = 0;
    c->offsets[i] = c->slots[i] * c->slot_bytes[0];
  }
  sort(c, count);
}

/* Make the records of pages that were written, the first of which is page `first` of the call. */
EXPORT void kvdock_record(const Call *c, const uint64_t *digests, int64_t first, int64_t count,
                          uint64_t segment, uint64_t tenant) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t page = first + i;
    uint64_t *words = c->records + i * RECORD_WORDS, state = SALT;
    words[LOW] = digests[2 * page], words[HIGH] = digests[2 * page + 1];
    words[CHECKSUM] = c->sums[i], words[TIMES] = 0;
    words[STORED] = (uint64_t)c->stored_ns[page], words[SEGMENT] = segment;
    words[PLACE] = (uint64_t)c->slots[i] << SLOT_SHIFT | tenant;
    for (int w = 0; w < CHECK; w++) {
      state = (state ^ words[w]) * FACTORS[w];
      state ^= state >> 29;
    }
    state *= MIX;
    words[CHECK] = state ^ state >> 29;
  }
}

/* Insert records of keys that are not in the index; return how many empty lanes they take. */
EXPORT int64_t kvdock_insert(const Index *index, const Call *c, int64_t first, int64_t count,
                             int64_t first_row) {
  const uint64_t mask = (uint64_t)index->buckets - 1;
  int64_t taken = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint64_t *words = c->records + i * RECORD_WORDS;
    const int64_t row = first_row + c->slots[i];
    memcpy(index->words + row * RECORD_WORDS, words, RECORD_WORDS * sizeof *words);
    index->used_ns[row] = c->used_ns[first + i];
    for (uint64_t bucket = words[LOW] & mask, lane = 0;; lane++) {
      if (lane == LANES) bucket = (bucket + 1) & mask, lane = 0;
      uint64_t *entry = index->lanes + bucket * LANES + lane;
      if (*entry && *entry != TOMB) continue;
      taken += !*entry;
      *entry = words[HIGH] >> 32 << 32 | (uint64_t)(row + 1);
      break;
    }
  }
  return taken;
}
