// Chooses the kernels' instruction set once, at run time.
#include <cstring>

#if defined(KVR_HAVE_X86)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace kvr {

#ifdef KVR_HAVE_X86
extern const KernelTable table_avx512_amx;
extern const KernelTable table_avx512_bf16;
extern const KernelTable table_avx512;
extern const KernelTable table_avx2;
#endif
extern const KernelTable table_portable;

namespace {

#ifdef KVR_HAVE_X86
// Asks Linux for the tile registers, which it gives a process, all its threads, and its children.
bool has_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

bool runs_here([[maybe_unused]] const KernelTable& table) {
#ifdef KVR_HAVE_X86
  if (&table == &table_avx512_amx)
    return runs_here(table_avx512_bf16) && __builtin_cpu_supports("amx-tile") &&
           __builtin_cpu_supports("amx-bf16") && has_tiles();
  if (&table == &table_avx512_bf16)
    return runs_here(table_avx512) && __builtin_cpu_supports("avx512bf16");
  if (&table == &table_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
  if (&table == &table_avx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
#endif
  return true;
}

const KernelTable* const kTables[] = {
#ifdef KVR_HAVE_X86
    &table_avx512_amx,
    &table_avx512_bf16,
    &table_avx512,
    &table_avx2,
#endif
    &table_portable,
};

}  // namespace

const KernelTable* kernels_for(const char* isa) {
  for (const KernelTable* table : kTables)
    if (std::strcmp(table->isa, isa) == 0 && runs_here(*table)) return table;
  return nullptr;
}

std::vector<const char*> compiled_isas() {
  std::vector<const char*> names;
  for (const KernelTable* table : kTables) names.push_back(table->isa);
  return names;
}

const KernelTable& kernels() {
  static const KernelTable& best = [] () -> const KernelTable& {
    for (const KernelTable* table : kTables)
      if (runs_here(*table)) return *table;
    return table_portable;
  }();
  return best;
}

}  // namespace kvr
