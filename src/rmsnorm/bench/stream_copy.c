// A copy that stores past the cache, by several threads: the limit for results that go to memory.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#else
#error "no instruction that stores past the cache is known for this machine"
#endif

enum { kLine = 64 };

static void store_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)to, _mm512_loadu_si512(from));
#elif defined(__AVX__)
  const __m256i low = _mm256_loadu_si256((const __m256i*)from);
  const __m256i high = _mm256_loadu_si256((const __m256i*)(from + 32));
  _mm256_stream_si256((__m256i*)to, low);
  _mm256_stream_si256((__m256i*)(to + 32), high);
#else
  for (int part = 0; part < kLine; part += 16) {
    _mm_stream_si128((__m128i*)(to + part), _mm_loadu_si128((const __m128i*)(from + part)));
  }
#endif
}

static void copy_part(char* to, const char* from, size_t bytes) {
  size_t head = (kLine - (uintptr_t)to % kLine) % kLine;
  if (head > bytes) head = bytes;
  memcpy(to, from, head);
  size_t done = head;
  for (; done + kLine <= bytes; done += kLine) store_line(to + done, from + done);
  memcpy(to + done, from + done, bytes - done);
  _mm_sfence();
}

void stream_copy(char* to, const char* from, size_t bytes, int threads) {
  const size_t share = bytes / (size_t)threads / kLine * kLine;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int part = 0; part < threads; ++part) {
    const size_t start = (size_t)part * share;
    copy_part(to + start, from + start, part == threads - 1 ? bytes - start : share);
  }
}
