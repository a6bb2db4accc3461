// Attention of prompts; compiled once per instruction set.
#include "prompt/prompting.h"

namespace kvr {
namespace KVR_ISA {

void attend_prompt(const PromptAttention& a) {
  switch (a.dtype) {
    case DType::kBFloat16: return prompt::Prompting<prompt::ProductOf<BFloat16>::type>(a).run();
    case DType::kFloat16: return prompt::Prompting<prompt::ProductOf<Float16>::type>(a).run();
    case DType::kFloat32: return prompt::Prompting<prompt::ProductOf<Float32>::type>(a).run();
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
