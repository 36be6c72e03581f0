#pragma once

// The users' umbrella; nothing inside dtensor/ includes it.
#include "dtensor/core/boxes.h"
#include "dtensor/core/error.h"
#include "dtensor/core/mesh.h"
#include "dtensor/core/placement.h"
#include "dtensor/core/plan.h"
#include "dtensor/core/rule.h"
#include "dtensor/core/spec.h"
#include "dtensor/core/tensor_meta.h"
#include "dtensor/core/view.h"
#ifdef DTENSOR_HAS_TORCH
#include "dtensor/checkpoint/checkpoint.h"
#include "dtensor/comm/world.h"
#include "dtensor/parallel/fully_shard.h"
#include "dtensor/parallel/styles.h"
#include "dtensor/runtime/accumulate.h"
#include "dtensor/runtime/dispatch.h"
#include "dtensor/runtime/explain.h"
#include "dtensor/runtime/factories.h"
#include "dtensor/runtime/init.h"
#include "dtensor/runtime/local_map.h"
#include "dtensor/runtime/mesh_scope.h"
#include "dtensor/runtime/module.h"
#include "dtensor/runtime/random.h"
#include "dtensor/runtime/record.h"
#include "dtensor/runtime/tensor.h"
#endif
