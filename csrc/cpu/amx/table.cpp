// The functions of machines with AMX: those of AVX-512 BF16, and for attention and many tokens tiles.
#include "kernels.h"

namespace kvr {

extern const KernelTable table_avx512_bf16;

namespace avx512_amx {
void attend(const Attention&);                   // amx/attend.cpp
void attend_prompt(const PromptAttention&);      // amx/attend_prompt.cpp
void multiply_quantised(const QuantisedLayer&);  // amx/quantised.cpp
}  // namespace avx512_amx

static KernelTable with_tiles() {
  KernelTable table = table_avx512_bf16;
  table.isa = "avx512_amx";
  table.attend = avx512_amx::attend;
  table.attend_prompt = avx512_amx::attend_prompt;
  table.multiply_quantised = avx512_amx::multiply_quantised;
  return table;
}

extern const KernelTable table_avx512_amx;
const KernelTable table_avx512_amx = with_tiles();

}  // namespace kvr
