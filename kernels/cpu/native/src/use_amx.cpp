// Asks the system for the tile unit. Its registers are large, so Linux gives them only to processes that ask.
#include <sys/syscall.h>
#include <unistd.h>

#include "amx.h"
#include "ops.h"

namespace v4flash {

bool use_amx(bool wanted) {
  bool granted = false;
#if defined(__AMX_BF16__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  granted = wanted && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
  amx_in_use() = granted;
  return granted;
}

}  // namespace v4flash
