/* Another processor for a program, as far as CPUID goes: test_processor.py preloads it.

   The kernel lets CPUID fault (arch_prctl ARCH_SET_CPUID, Intel since Ivy Bridge, AMD since Zen 4), and the handler
   answers as the processor that the variable PROCESSOR names. So a library finds another vendor, other instruction
   sets and other caches, and takes the kernels that it would take there. What instructions compute stays that of this
   processor: RSQRTPS and RCPPS, whose last bits the vendors choose, are its own.
   The dynamic loader runs before this, so libc chooses its functions by the true processor; test_processor.py sets
   GLIBC_TUNABLES for it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define NO_FAULTING 77 /* exit code; the test skips */

/* Leaf 7: AVX-512, its bfloat16 and float16, AMX, and AVX for VNNI. */
#define AVX512_EBX (1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31)
#define AVX512_ECX (1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14)
#define AVX512_EDX (1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25)

typedef struct {
  uint32_t eax, ebx, ecx, edx;
} Registers;

static int imitates;
static int as_amd;

static long set_cpuid(long allowed) {
  return syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed);
}

static Registers ask(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __asm__ volatile("cpuid" : "=a"(r.eax), "=b"(r.ebx), "=c"(r.ecx), "=d"(r.edx) : "a"(leaf), "c"(subleaf));
  return r;
}

/* Four letters of a text, as a register holds them. */
static uint32_t letters(const char *text, unsigned at) {
  uint32_t value = 0;
  memcpy(&value, text + 4 * at, 4);
  return value;
}

/* An AMD EPYC 7742 (Zen 2) of the features that this processor has, too. */
static Registers answer_as_amd(uint32_t leaf, uint32_t subleaf, Registers r) {
  static const char name[49] = "AMD EPYC 7742 64-Core Processor";
  static const Registers none;
  /* Leaf 0x8000001D: L1 data, L1 instructions, L2, L3; ways - 1, and sets - 1 of 64 bytes */
  static const Registers caches[] = {
      {0x121, 7u << 22 | 63, 63, 0}, {0x122, 7u << 22 | 63, 63, 0}, {0x143, 7u << 22 | 63, 1023, 2},
      {0x163, 15u << 22 | 63, 16383, 1}};

  if (leaf == 0 || leaf == 0x80000000u) {
    r.eax = leaf ? 0x8000001Eu : 0x10u;
    r.ebx = letters("AuthenticAMD", 0);
    r.edx = letters("AuthenticAMD", 1);
    r.ecx = letters("AuthenticAMD", 2);
  } else if (leaf == 1) {
    r.eax = 0x00830F10u; /* family 23, model 49 */
    r.ecx &= 0xFED8320Bu;
  } else if (leaf == 7) {
    r.ebx &= subleaf ? 0 : 0x219C91A9u;
    r.ecx &= subleaf ? 0 : 1u << 2 | 1u << 22;
    r.eax = 0;
    r.edx = 0;
  } else if (leaf == 0x80000001u) {
    r.eax = 0x00830F10u;
    r.ecx |= 1u << 22; /* leaf 0x8000001D exists */
  } else if (leaf >= 0x80000002u && leaf <= 0x80000004u) {
    unsigned at = 4 * (leaf - 0x80000002u);
    r = (Registers){letters(name, at), letters(name, at + 1), letters(name, at + 2), letters(name, at + 3)};
  } else if (leaf == 0x80000005u) {
    r = (Registers){0xFF40FF40u, 0xFF40FF40u, 0x20080140u, 0x20080140u};
  } else if (leaf == 0x80000006u) {
    r = (Registers){0x48006400u, 0x68006400u, 0x02006140u, 0x00809140u};
  } else if (leaf == 0x8000001Du) {
    r = subleaf < 4 ? caches[subleaf] : none;
  } else if (leaf == 2 || leaf == 4 || (leaf > 0x10 && leaf < 0x40000000u) || leaf > 0x8000001Eu) {
    r = none; /* Intel's */
  }
  return r;
}

static Registers answer(uint32_t leaf, uint32_t subleaf) {
  Registers r = ask(leaf, subleaf);
  if (leaf == 7) {
    if (subleaf == 0) {
      r.ebx &= ~AVX512_EBX;
      r.ecx &= ~AVX512_ECX;
      r.edx &= ~AVX512_EDX;
    } else {
      r.eax = 0;
      r.edx = 0;
    }
  }
  return as_amd ? answer_as_amd(leaf, subleaf, r) : r;
}

static void on_fault(int number, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const unsigned char *code = (const unsigned char *)registers[REG_RIP];
  (void)info;
  if (code[0] != 0x0F || code[1] != 0xA2) { /* another fault: happens again, and ends the program */
    signal(number, SIG_DFL);
    return;
  }
  set_cpuid(1);
  Registers r = answer((uint32_t)registers[REG_RAX], (uint32_t)registers[REG_RCX]);
  set_cpuid(0);
  registers[REG_RAX] = r.eax;
  registers[REG_RBX] = r.ebx;
  registers[REG_RCX] = r.ecx;
  registers[REG_RDX] = r.edx;
  registers[REG_RIP] += 2;
}

/* Nobody else handles the signal: torchrun and Python would, to print a trace. */
int sigaction(int number, const struct sigaction *action, struct sigaction *before) {
  int (*next)(int, const struct sigaction *, struct sigaction *);
  *(void **)&next = dlsym(RTLD_NEXT, "sigaction");
  return next(number, number == SIGSEGV && imitates ? NULL : action, before);
}

__attribute__((constructor)) static void begin(void) {
  const char *name = getenv("PROCESSOR");
  struct sigaction action;
  if (!name) {
    return;
  }
  as_amd = strcmp(name, "AMD Zen 2") == 0;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, NULL);
  if (set_cpuid(0)) {
    fputs("CPUID does not fault here: the kernel or the processor does not offer it\n", stderr);
    _exit(NO_FAULTING);
  }
  imitates = 1;
}
