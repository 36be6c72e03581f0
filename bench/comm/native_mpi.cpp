#include <mpi.h>

#include "bench/comm/measure.h"

namespace dtensor::bench {

std::vector<Sample> measure_native_mpi() {
  MPI_Init(nullptr, nullptr);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::vector<float> buffer(static_cast<std::size_t>(message_sizes().back()) / sizeof(float), 0.f);
  auto samples = measure({.all_reduce =
                              [&](std::int64_t bytes) {
                                MPI_Allreduce(MPI_IN_PLACE, buffer.data(), static_cast<int>(bytes / 4), MPI_FLOAT,
                                              MPI_SUM, MPI_COMM_WORLD);
                              },
                          .barrier = [] { MPI_Barrier(MPI_COMM_WORLD); },
                          .largest =
                              [](float mine) {
                                MPI_Allreduce(MPI_IN_PLACE, &mine, 1, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
                                return mine;
                              }});
  MPI_Finalize();
  if (rank != 0) samples.clear();
  return samples;
}

}  // namespace dtensor::bench
