// Prints hashes of what this kind of processor computes from made-up numbers, and whether a row's bits depend on the
// other rows: for a kind that only an emulator can run.

#include <cstdio>
#include <vector>

#include "linear.h"

#define JOINED(a, b) a##_##b
#define NAMED(a, b) JOINED(a, b)
#define EXPORTED(name) NAMED(space_##name, KIND)

using namespace KIND;

extern "C" {
void EXPORTED(pack)(const bf16*, int64_t, int64_t, bf16*);
void EXPORTED(pack_groups)(const GroupWeights*, int64_t, int64_t, int, uint8_t*);
int64_t EXPORTED(panel_bytes)(int64_t, int);
int64_t EXPORTED(padded)(int64_t);
void EXPORTED(linear)(const Linear*, const Matmul*, int);
void EXPORTED(norm)(const bf16*, const bf16*, int64_t, int64_t, float, bf16*, int);
}

constexpr int64_t ROWS = 40, OUTPUTS = 96, INPUTS = 704, PANELS = OUTPUTS / LANES;
constexpr int64_t GROUPS = (INPUTS / 32 + 7) / 8 * 8;  // those of K forms, which come by eights

uint32_t next() {
    static uint64_t state = 12345;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t(state >> 33);
}

float uniform() { return float(next() & 0xffffff) / 16777216.0f * 2 - 1; }

template <typename T>
unsigned long long hash(const std::vector<T>& values) {
    unsigned long long found = 1469598103934665603ull;
    const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); ++i) found = (found ^ bytes[i]) * 1099511628211ull;
    return found;
}

std::vector<bf16> x(ROWS * INPUTS);
std::vector<float> bias(OUTPUTS);

void compute(const Linear& linear, int64_t first, int64_t rows, std::vector<float>& y) {
    Matmul matmul{};
    matmul.x = x.data() + first * INPUTS;
    matmul.rows = rows;
    matmul.x_stride = INPUTS;
    matmul.y = y.data();
    matmul.y_stride = OUTPUTS;
    matmul.wide = true;
    EXPORTED(linear)(&linear, &matmul, 1);
}

void show(const char* name, const void* panels, const float* scale, Groups groups) {
    const Linear linear{panels, scale, bias.data(), PANELS, INPUTS, OUTPUTS, groups};
    std::vector<float> whole(ROWS * OUTPUTS), part(ROWS * OUTPUTS);
    compute(linear, 0, ROWS, whole);
    bool invariant = true;
    for (int64_t rows = 1; rows <= ROWS; ++rows)
        for (int64_t first : {int64_t(0), ROWS - rows}) {
            compute(linear, first, rows, part);
            invariant &= !std::memcmp(part.data(), whole.data() + first * OUTPUTS, rows * OUTPUTS * sizeof(float));
        }
    std::printf("%s %s %016llx\n", name, invariant ? "invariant" : "variant", hash(whole));
}

int main() {
    for (auto& value : x) value = round(uniform() * 2);
    for (auto& value : bias) value = uniform();

    std::vector<bf16> weight(OUTPUTS * INPUTS), packed(OUTPUTS * EXPORTED(padded)(INPUTS));
    for (auto& value : weight) value = round(uniform() * 0.05f);
    EXPORTED(pack)(weight.data(), OUTPUTS, INPUTS, packed.data());
    show("bfloat16", packed.data(), nullptr, Groups::NONE);

    std::vector<float> scale(OUTPUTS);
    for (auto& value : scale) value = std::fabs(uniform()) * 0.01f;
    const struct {
        const char* name;
        Groups groups;
        uint32_t numbers;
    } forms[] = {{"Q4_0", Groups::Q4_0, 16}, {"Q4_1", Groups::Q4_1, 16}, {"Q8_0", Groups::Q8_0, 255},
                 {"Q4_K", Groups::Q4_K, 16}, {"Q5_K", Groups::Q5_K, 32}, {"Q6_K", Groups::Q6_K, 64},
                 {"int8", Groups::INT8, 255}};
    for (const auto& form : forms) {
        std::vector<uint8_t> kept(OUTPUTS * GROUPS * 32), steps(OUTPUTS * GROUPS * 2), min_steps(OUTPUTS * GROUPS);
        std::vector<uint16_t> scales(OUTPUTS * GROUPS), mins(OUTPUTS * GROUPS);
        for (auto& value : kept) value = uint8_t(next() % form.numbers - (form.numbers == 255 ? 127 : 0));
        for (auto* values : {&scales, &mins})
            for (auto& value : *values) value = uint16_t(0x1c00 + next() % 0x400);  // 0.0039 to 0.0078
        for (auto* values : {&steps, &min_steps})
            for (auto& value : *values) value = uint8_t(next() % 64);
        const GroupWeights groups{kept.data(), scales.data(), mins.data(), steps.data(), min_steps.data()};
        std::vector<uint8_t> panels(PANELS * EXPORTED(panel_bytes)(INPUTS, int(form.groups)));
        EXPORTED(pack_groups)(&groups, OUTPUTS, INPUTS, int(form.groups), panels.data());
        show(form.name, panels.data(), form.groups == Groups::INT8 ? scale.data() : nullptr, form.groups);
    }

    std::vector<bf16> norms(INPUTS), normed(ROWS * INPUTS);
    for (auto& value : norms) value = round(uniform());
    EXPORTED(norm)(x.data(), norms.data(), ROWS, INPUTS, 1e-5f, normed.data(), 1);
    std::printf("norm invariant %016llx\n", hash(normed));
}
