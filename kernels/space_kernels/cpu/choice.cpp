#include "choice.h"
#include "export.h"
#include "team.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace KIND {

namespace {

constexpr int64_t BLOCK = 512;  // logits per cell; only a cell's greatest is kept
constexpr int64_t CELL = 16;

// Integers in the order of the floats: NaN lies beyond both infinities, and -0 equals 0. Compilers vectorise reductions
// over integers, which they may not for floats.
inline int32_t rank_of(float x) {
    x += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

const int32_t LEAST = rank_of(-INFINITY), MOST = rank_of(INFINITY);

inline int32_t greatest(const float* x, int64_t count) {
    int32_t found = std::numeric_limits<int32_t>::min();
    for (int64_t i = 0; i < count; ++i) found = std::max(found, rank_of(x[i]));
    return found;
}

inline int32_t smallest(const float* x, int64_t count) {
    int32_t found = std::numeric_limits<int32_t>::max();
    for (int64_t i = 0; i < count; ++i) found = std::min(found, rank_of(x[i]));
    return found;
}

float* ban(const Logits& logits, int64_t row) {
    float* x = logits.values + row * logits.stride;
    for (int64_t i = 0; i < logits.num_banned; ++i) x[logits.banned[i]] = -INFINITY;
    return x;
}

void greatest_of_row(const float* x, int64_t vocabulary, int64_t* id, bool* valid) {
    int32_t high = std::numeric_limits<int32_t>::min(), low = std::numeric_limits<int32_t>::max();
    int64_t where = 0;
    for (int64_t first = 0; first < vocabulary; first += BLOCK) {
        const int64_t count = std::min(BLOCK, vocabulary - first);
        const int32_t most = greatest(x + first, count);
        low = std::min(low, smallest(x + first, count));
        if (most > high) high = most, where = first;
    }
    while (rank_of(x[where]) != high) ++where;
    *id = where;
    *valid = high > LEAST && high < MOST && low >= LEAST;
}

struct Best {
    std::vector<int32_t> cells;  // the greatest of each cell
    std::vector<std::pair<int32_t, int32_t>> found;  // rank and id; smaller is better

    void of_row(const float* x, int64_t vocabulary, int64_t count, int64_t* ids, float* offsets) {
        int64_t cell = CELL;
        while (vocabulary / (2 * cell) >= 2 * count) cell *= 2;
        cells.clear();
        for (int64_t first = 0; first < vocabulary; first += cell)
            cells.push_back(greatest(x + first, std::min(cell, vocabulary - first)));
        // At least `count` logits are no smaller than the greatest logit of the count-th best cell.
        int32_t bound = std::numeric_limits<int32_t>::min();
        if (int64_t(cells.size()) > count) {
            order = cells;
            std::nth_element(order.begin(), order.begin() + count - 1, order.end(), std::greater<int32_t>());
            bound = order[count - 1];
        }
        found.clear();
        for (int64_t number = 0; number < int64_t(cells.size()); ++number) {
            if (cells[number] < bound) continue;
            const int64_t behind = std::min((number + 1) * cell, vocabulary);
            for (int64_t i = number * cell; i < behind; ++i)
                if (const int32_t rank = rank_of(x[i]); rank >= bound) found.push_back({~rank, int32_t(i)});
        }
        if (int64_t(found.size()) > count) {
            std::nth_element(found.begin(), found.begin() + count, found.end());
            found.resize(count);
        }
        std::sort(found.begin(), found.end(), [](auto a, auto b) { return a.second < b.second; });
        for (int64_t i = 0; i < count; ++i) {
            ids[i] = found[i].second;
            offsets[i] = x[ids[i]] > -INFINITY ? 0.0f : -INFINITY;
        }
    }

   private:
    std::vector<int32_t> order;
};

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;
constexpr double GUMBEL_MIN = -3.129994641;  // lower bound of the noise
constexpr double LOUD_NOISE = 6.0;
constexpr uint32_t LOUD_BITS = 4284334321u;  // ceil(2^32 exp(-exp(-LOUD_NOISE))): fewer bits give less noise than that
constexpr int64_t GROUP = 64;                // ids whose greatest logit and bits are kept, to find the few that matter

inline uint64_t finalise(uint64_t word) {  // of SplitMix64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

inline uint32_t bits_of(uint64_t stream, int64_t id) {
    return uint32_t(finalise(stream + (uint64_t(id) + 1) * GOLDEN) >> 32);
}

// Random bits of a request at a position, from which those of each id follow.
inline uint64_t stream_of(int64_t key, int64_t position) {
    return finalise(finalise(uint64_t(key)) + (uint64_t(position) + 1) * GOLDEN);
}

inline double gumbel(uint32_t bits) { return -std::log(-std::log((double(bits) + 0.5) * 0x1p-32)); }

// exp(x) for x <= 0, within two units of the last place; 0 below -708. Without branches, so that it is vectorised.
inline double exponential(double x) {
    constexpr double SHIFT = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    const double clamped = x < -708.0 ? -708.0 : x;
    const double shifted = clamped * 1.4426950408889634 + SHIFT, n = shifted - SHIFT;
    const double r = (clamped - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;  // ln 2 in two parts
    double e = 1.0 / 6227020800;
    e = e * r + 1.0 / 479001600;
    e = e * r + 1.0 / 39916800;
    e = e * r + 1.0 / 3628800;
    e = e * r + 1.0 / 362880;
    e = e * r + 1.0 / 40320;
    e = e * r + 1.0 / 5040;
    e = e * r + 1.0 / 720;
    e = e * r + 1.0 / 120;
    e = e * r + 1.0 / 24;
    e = e * r + 1.0 / 6;
    e = e * r + 0.5;
    e = e * r + 1.0;
    e = e * r + 1.0;
    uint64_t exponent, bits;
    std::memcpy(&exponent, &shifted, 8);
    std::memcpy(&bits, &e, 8);
    bits += exponent << 52;
    std::memcpy(&e, &bits, 8);
    return x < -708.0 ? 0.0 : e;
}

// Sampling of one row after the other; the buffers are kept between rows.
struct Sampler {
    void row(const float* x, int64_t vocabulary, const Sampling& sampling, int64_t number, int64_t* id, bool* valid) {
        V = vocabulary;
        read(x, sampling.sampled[number] ? sampling.divisors[number] : 1.0f);
        const int64_t group = std::max_element(group_best.begin(), group_best.end()) - group_best.begin();
        const int32_t high = group_best[group];
        int64_t where = group * GROUP;
        while (where < V && rank_of(z[where]) != high) ++where;
        *id = where;
        *valid = high > LEAST && high < MOST && low >= LEAST;
        if (!*valid || !sampling.sampled[number]) return;
        best = z[where];
        stream = stream_of(sampling.keys[number], sampling.positions[number]);
        winner = where, highest = -INFINITY;
        floor = double(best) + sampling.log_min_p[number];
        const int64_t top_k = sampling.top_k[number] > 0 ? std::min(sampling.top_k[number], V) : V;
        if (top_k < V || sampling.top_p[number] < 1.0)
            of_first(top_k, sampling.top_p[number]);
        else
            of_all();
        *id = winner;
    }

   private:
    int64_t V;
    std::vector<float> z;             // [V] divided logits
    std::vector<uint32_t> bits;       // [V] random bits
    std::vector<int32_t> group_best;  // greatest rank of each group
    std::vector<uint32_t> group_bits;
    std::vector<std::pair<int32_t, int32_t>> order;  // inverted rank and id: the first in order is smallest
    int32_t low;
    float best;
    uint64_t stream;
    double floor;  // the lowest logit that min_p keeps
    int64_t winner;
    double highest;

    void read(const float* x, float divisor) {
        const int64_t num_groups = (V + GROUP - 1) / GROUP;
        z.resize(V), group_best.resize(num_groups);
        low = std::numeric_limits<int32_t>::max();
        for (int64_t group = 0; group < num_groups; ++group) {
            const int64_t first = group * GROUP, count = std::min(GROUP, V - first);
            float* y = z.data() + first;
            for (int64_t i = 0; i < count; ++i) y[i] = x[first + i] / divisor;
            group_best[group] = greatest(y, count);
            low = std::min(low, smallest(y, count));
        }
    }

    void score(int64_t id, uint32_t random) {
        if (double(z[id]) < floor) return;
        const double value = double(z[id]) + gumbel(random);
        if (value > highest || (value == highest && id < winner)) highest = value, winner = id;
    }

    // Among all ids. Noise is computed for few: first where the random bits are high, one id in 400; then for the
    // others that could still beat the best of these.
    void of_all() {
        const int64_t num_groups = int64_t(group_best.size());
        bits.resize(V), group_bits.resize(num_groups);
        for (int64_t group = 0; group < num_groups; ++group) {
            const int64_t first = group * GROUP, count = std::min(GROUP, V - first);
            uint32_t* random = bits.data() + first;
            uint32_t most = 0;
            for (int64_t i = 0; i < count; ++i) random[i] = bits_of(stream, first + i);
            for (int64_t i = 0; i < count; ++i) most = std::max(most, random[i]);
            group_bits[group] = most;
        }
        for (int64_t group = 0; group < num_groups; ++group) {
            if (group_bits[group] < LOUD_BITS) continue;
            const int64_t behind = std::min((group + 1) * GROUP, V);
            for (int64_t id = group * GROUP; id < behind; ++id)
                if (bits[id] >= LOUD_BITS && z[id] > -INFINITY) score(id, bits[id]);
        }
        const double enough = std::max(highest, double(best) + GUMBEL_MIN) - LOUD_NOISE - 0.01;
        const float bound = std::nextafter(float(enough), -INFINITY);
        const int32_t least = rank_of(bound);
        for (int64_t group = 0; group < num_groups; ++group) {
            if (group_best[group] < least) continue;
            const int64_t behind = std::min((group + 1) * GROUP, V);
            for (int64_t id = group * GROUP; id < behind; ++id)
                if (z[id] >= bound && bits[id] < LOUD_BITS) score(id, bits[id]);
        }
    }

    double weight(float x) const { return exponential(double(x) - double(best)); }

    double sum_of_weights() const {
        double lanes[LANES] = {};
        int64_t i = 0;
        for (; i + LANES <= V; i += LANES)
            for (int lane = 0; lane < LANES; ++lane) lanes[lane] += weight(z[i + lane]);
        double sum = 0;
        for (; i < V; ++i) sum += weight(z[i]);
        for (double lane : lanes) sum += lane;
        return sum;
    }

    // Among the top_k first, and of these those before which less than top_p of their probability lies. They are put
    // in order band by band from the greatest logit downwards, as far as needed.
    void of_first(int64_t top_k, double top_p) {
        const bool by_share = top_p < 1.0;
        const double sum = by_share ? sum_of_weights() : 1.0;
        order.clear();
        double reached = 0;  // before `kept` ids
        size_t kept = 0;
        float above = INFINITY;
        for (float width = 4; above > -INFINITY; width *= 2) {
            const float under = width > 100 ? -INFINITY : best - width;
            const size_t known = order.size();
            collect(under, above);
            std::sort(order.begin() + known, order.end());
            above = under;
            if (top_k < V && int64_t(order.size()) >= top_k) {
                order.resize(top_k);
                break;
            }
            if (by_share && top_k == V) {
                while (kept < order.size() && reached < top_p) reached += weight(z[order[kept++].second]) / sum;
                if (kept < order.size() || reached >= top_p) break;
            }
        }
        if (!by_share) {
            kept = order.size();
        } else if (top_k < V) {
            double total = 0;
            for (auto [rank, id] : order) total += weight(z[id]) / sum;
            for (; kept < order.size() && reached < top_p * total; ++kept)
                reached += weight(z[order[kept].second]) / sum;
        }
        for (size_t i = 0; i < kept; ++i) score(order[i].second, bits_of(stream, order[i].second));
    }

    // Adds the ids with under <= z < above; for under = -infinity those with -infinity < z < above.
    void collect(float under, float above) {
        const int32_t least = rank_of(under);
        for (int64_t group = 0; group < int64_t(group_best.size()); ++group) {
            if (group_best[group] < least) continue;
            const int64_t behind = std::min((group + 1) * GROUP, V);
            for (int64_t id = group * GROUP; id < behind; ++id)
                if (z[id] >= under && z[id] < above && z[id] > -INFINITY) order.push_back({~rank_of(z[id]), int32_t(id)});
        }
    }
};

}  // namespace

void sample(const Logits& logits, const Sampling& sampling, int64_t* ids, bool* valid, int num_threads) {
    share_out(num_threads, logits.rows, [&](int64_t first, int64_t last, bool) {
        thread_local Sampler sampler;
        for (int64_t row = first; row < last; ++row)
            sampler.row(ban(logits, row), logits.vocabulary, sampling, row, ids + row, valid + row);
    });
}

void noise_of(int64_t key, int64_t position, const int64_t* ids, int64_t count, float* noise) {
    const uint64_t stream = stream_of(key, position);
    for (int64_t i = 0; i < count; ++i) noise[i] = float(gumbel(bits_of(stream, ids[i])));
}

void argmax(const Logits& logits, int64_t* ids, bool* valid, int num_threads) {
    share_out(num_threads, logits.rows, [&](int64_t first, int64_t last, bool) {
        for (int64_t row = first; row < last; ++row)
            greatest_of_row(ban(logits, row), logits.vocabulary, ids + row, valid + row);
    });
}

void best_of(const Logits& logits, int64_t count, int64_t* ids, float* offsets, int num_threads) {
    share_out(num_threads, logits.rows, [&](int64_t first, int64_t last, bool) {
        Best best;
        for (int64_t row = first; row < last; ++row)
            best.of_row(ban(logits, row), logits.vocabulary, count, ids + row * count, offsets + row * count);
    });
}

}  // namespace KIND

using namespace KIND;

extern "C" {

void EXPORT(argmax)(const Logits* logits, int64_t* ids, bool* valid, int num_threads) {
    argmax(*logits, ids, valid, num_threads);
}

void EXPORT(sample)(const Logits* logits, const Sampling* sampling, int64_t* ids, bool* valid, int num_threads) {
    sample(*logits, *sampling, ids, valid, num_threads);
}

void EXPORT(best_of)(const Logits* logits, int64_t count, int64_t* ids, float* offsets, int num_threads) {
    best_of(*logits, count, ids, offsets, num_threads);
}
}
