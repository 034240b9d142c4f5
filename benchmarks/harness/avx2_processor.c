// Preloaded into a program, makes it see a processor that has AVX2 and no wider or newer vector instructions: no
// AVX-512, no AMX, no VNNI. Where instruction sets are chosen at run time, the program then runs as it would there.
//
// Linux on x86 can have the cpuid instruction fault (arch_prctl, ARCH_SET_CPUID). The handler runs it for the program
// and clears those bits (Intel's manual, volume 2, CPUID). Threads and forks inherit the setting; after an exec this
// file is loaded, and sets it, anew.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { kCannot = 97 };  // exit status where cpuid cannot be made to fault

static int (*real_sigaction)(int, const struct sigaction*, struct sigaction*);

static uint32_t bits(const int* numbers, int count) {
  uint32_t mask = 0;
  for (int i = 0; i < count; i++) mask |= 1u << numbers[i];
  return mask;
}
#define BITS(...) bits((const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int))

static void make_cpuid_fault(int is_on) {
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, !is_on)) _exit(kCannot);
}

static void on_fault(int number, siginfo_t* info, void* context) {
  (void)info;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* instruction = (const uint8_t*)registers[REG_RIP];
  if (instruction[0] != 0x0f || instruction[1] != 0xa2) {  // a fault of the program's own: it faults again, and dies
    const struct sigaction dying = {.sa_handler = SIG_DFL};
    real_sigaction(number, &dying, NULL);
    return;
  }
  const uint32_t leaf = (uint32_t)registers[REG_RAX], subleaf = (uint32_t)registers[REG_RCX];
  uint32_t a, b, c, d;
  make_cpuid_fault(0);
  __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "0"(leaf), "2"(subleaf));
  make_cpuid_fault(1);
  if (leaf == 7 && subleaf == 0) {
    b &= ~BITS(16, 17, 21, 26, 27, 28, 30, 31);  // AVX-512 F, DQ, IFMA, PF, ER, CD, BW, VL
    c &= ~BITS(1, 6, 8, 9, 10, 11, 12, 14);      // its VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; GFNI, VAES, VPCLMULQDQ
    d &= ~BITS(2, 3, 8, 22, 23, 24, 25);         // its 4VNNIW, 4FMAPS, VP2INTERSECT, FP16; AMX
  } else if (leaf == 7 || leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {
    a = b = c = d = 0;  // AVX-VNNI, AVX-IFMA and later ones; shapes of tiles; AVX10
  }
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

// The handler stays: a program that wants SIGSEGV for itself is told that it has it.
int sigaction(int number, const struct sigaction* action, struct sigaction* old) {
  if (!real_sigaction) *(void**)&real_sigaction = dlsym(RTLD_NEXT, "sigaction");
  if (number != SIGSEGV) return real_sigaction(number, action, old);
  if (old) memset(old, 0, sizeof *old);
  return 0;
}

__attribute__((constructor)) static void begin(void) {
  if (!real_sigaction) *(void**)&real_sigaction = dlsym(RTLD_NEXT, "sigaction");
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  real_sigaction(SIGSEGV, &action, NULL);
  make_cpuid_fault(1);
}
