#include "bench/comm/measure.h"

namespace dtensor::bench {

std::vector<Sample> measure_native_mpi() { return {}; }

}  // namespace dtensor::bench
