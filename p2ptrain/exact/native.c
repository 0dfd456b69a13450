/* Unpacking and counting, as codec.py and scales.py do it in NumPy: the same results, several times as fast.

   It needs no library, not even C's, so that one file serves every Linux of its processor. Numbers are little-endian.
   A size that a stranger could choose comes in nowhere: codec.py has compared the payload's length with the run's. */

#include <stdint.h>

#define ABI 2 /* raised with every change of what is called here; native.py refuses any other */
#define GOOD 0
#define WRONG_RANK 1
#define WRONG_ONES 2
#define NOT_RISING 3

int p2ptrain_abi(void) { return ABI; }

/* At least 57 bits of a section from this bit on, as far as it has them. */
static inline uint64_t bits_from(const uint8_t *section, int64_t bytes, int64_t bit) {
    int64_t first = bit >> 3, left = bytes - first;
    uint64_t word = 0;
    if (left >= 8)
        __builtin_memcpy(&word, section + first, 8);
    else
        for (int64_t place = 0; place < left; place++)
            word |= (uint64_t)section[first + place] << (8 * place);
    return word >> (bit & 7);
}

static inline uint64_t field(const uint8_t *section, int64_t bytes, int64_t number, int width) {
    return bits_from(section, bytes, number * width) & (((uint64_t)1 << width) - 1);
}

/* A field of up to 64 bits. */
static inline uint64_t rank_at(const uint8_t *section, int64_t bytes, int64_t bit, int width) {
    uint64_t rank = bits_from(section, bytes, bit) & 0xffffffff;
    rank |= bits_from(section, bytes, bit + 32) << 32;
    return width < 64 ? rank & (((uint64_t)1 << width) - 1) : rank;
}

/* Finds the ones of a chunk's bucket string: k rising places. */
static inline int of_string(const uint8_t *upper, int64_t bytes, int64_t start, int positions, int k, uint16_t *ones) {
    int found = 0;
    for (int at = 0; at < positions; at += 56) {
        int count = positions - at < 56 ? positions - at : 56;
        uint64_t word = bits_from(upper, bytes, start + at) & (((uint64_t)1 << count) - 1);
        for (; word; word &= word - 1) {
            if (found == k)
                return WRONG_ONES;
            ones[found++] = (uint16_t)(at + __builtin_ctzll(word));
        }
    }
    return found == k ? GOOD : WRONG_ONES;
}

/* The same for the ranks of some chunks, side by side, because each step waits for a load: the j-th one is at the last
   place whose binomial does not exceed what is left. A row has 2 * top binomials, of which the last are beyond any rank. */
#define LANES 4
static inline void of_ranks(uint64_t *ranks, const int64_t *binomials, int top, int k, uint16_t *const *ones) {
    for (int j = k; j > 0; j--) {
        const int64_t *row = binomials + (int64_t)j * 2 * top;
        uint64_t places[LANES] = {0};
        for (int step = top; step; step >>= 1)
#pragma GCC unroll 4
            for (int lane = 0; lane < LANES; lane++)
                places[lane] += (uint64_t)row[places[lane] + step] <= ranks[lane] ? step : 0;
        for (int lane = 0; lane < LANES; lane++) {
            ranks[lane] -= (uint64_t)row[places[lane]];
            ones[lane][j - 1] = (uint16_t)places[lane];
        }
    }
}

struct form {
    int64_t chunks, upper_bytes, low_bytes, sign_bytes, magnitude_bytes;
    uint64_t strings; /* 0: the bucket string is stored as it is */
    int32_t k, positions, top, upper_bits, low_bits, magnitude_bits, value_bytes;
};

int p2ptrain_unpack(const struct form *form, const uint8_t *upper, const uint8_t *low, const uint8_t *signs,
                    const uint8_t *magnitudes, const int64_t *binomials, uint16_t *indices, void *values) {
    const struct form f = *form;
    for (int64_t chunk = 0; chunk < f.chunks; chunk++) {
        uint16_t *here = indices + chunk * f.k;
        int64_t number = chunk * f.k;
        if (f.strings && chunk % LANES == 0) {
            uint64_t ranks[LANES];
            uint16_t *ones[LANES];
            for (int lane = 0; lane < LANES; lane++) { /* beyond the last chunk the first one again */
                int64_t ahead = chunk + lane < f.chunks ? lane : 0;
                ones[lane] = here + ahead * f.k;
                ranks[lane] = rank_at(upper, f.upper_bytes, (chunk + ahead) * f.upper_bits, f.upper_bits);
                if (ranks[lane] >= f.strings)
                    return WRONG_RANK;
            }
            of_ranks(ranks, binomials, f.top, f.k, ones);
        } else if (!f.strings && of_string(upper, f.upper_bytes, chunk * f.upper_bits, f.positions, f.k, here))
            return WRONG_ONES;
        int before = -1;
        for (int j = 0; j < f.k; j++, number++) {
            int index = (here[j] - j) << f.low_bits;
            if (f.low_bits)
                index |= (int)field(low, f.low_bytes, number, f.low_bits);
            if (index <= before)
                return NOT_RISING;
            here[j] = (uint16_t)(before = index);
            int value = f.magnitude_bits ? (int)field(magnitudes, f.magnitude_bytes, number, f.magnitude_bits) + 1 : 1;
            if (signs[number >> 3] >> (number & 7) & 1)
                value = -value;
            if (f.value_bytes == 1)
                ((int8_t *)values)[number] = (int8_t)value;
            else
                ((int16_t *)values)[number] = (int16_t)value;
        }
    }
    return GOOD;
}

/* Brings a value to the common unit by 2**shift, rounds half away from zero, and cuts it at `most`. */
static inline int32_t in_unit(int32_t value, int left, int right, int32_t most) {
    int32_t size = (value < 0 ? -value : value) << left;
    size = (size + ((1 << right) >> 1)) >> right;
    size = size < most ? size : most;
    return value < 0 ? -size : size;
}

#define COUNT(VALUE, SUM)                                                                                              \
    for (int64_t chunk = 0; chunk < chunks; chunk++) {                                                                 \
        SUM *room = (SUM *)sums + chunk * area; /* stays in a core's cache for all contributions */                    \
        for (int each = 0; each < count; each++) {                                                                     \
            const uint16_t *places = indices[each] + chunk * k[each];                                                  \
            const VALUE *value = (const VALUE *)values[each] + chunk * k[each];                                        \
            int shift = shifts ? shifts[each][chunk] : 0, left = shift > 0 ? shift : 0, right = shift < 0 ? -shift : 0; \
            for (int j = 0; j < k[each]; j++)                                                                          \
                room[places[j]] += (SUM)(shifts ? in_unit(value[j], left, right, most) : value[j]);                    \
        }                                                                                                              \
    }

/* Adds the votes of some contributions to the sums [chunks, area]. k: numbers of a chunk in each; shifts: of each chunk
   in each, from -15 to 15; null: values are votes */
void p2ptrain_count(int64_t chunks, int64_t area, int32_t count, const int32_t *k, const uint16_t *const *indices,
                    const void *const *values, int32_t value_bytes, const int8_t *const *shifts, int32_t most,
                    void *sums, int32_t sum_bytes) {
    if (value_bytes == 1 && sum_bytes == 2)
        COUNT(int8_t, int16_t)
    else if (value_bytes == 1 && sum_bytes == 4)
        COUNT(int8_t, int32_t)
    else if (value_bytes == 2 && sum_bytes == 2)
        COUNT(int16_t, int16_t)
    else
        COUNT(int16_t, int32_t)
}
