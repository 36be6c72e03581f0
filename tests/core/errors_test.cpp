// Bad input is one clear error; its text is part of the contract.
#include <gtest/gtest.h>

#include "dtensor/core/spec.h"
#include "dtensor/core/view.h"
#include "tests/core/expect_error.h"

namespace dtensor {
namespace {

const Mesh kMesh = Mesh::make({2, 3}, {"dp", "tp"});
const TensorMeta kMeta({8, 6}, DType::kF32);

TEST(Errors, MeshShapesAndNames) {
  EXPECT_ERROR(Mesh::make({2, 0}), kInvalidArgument,
               "[mesh] a mesh cannot have this shape; got 2x0; expected 1 to 16 dims of size 1 or more with a product "
               "below 2^63");
  EXPECT_ERROR(Mesh::make({}), kInvalidArgument,
               "[mesh] a mesh cannot have this shape; got no dims; expected 1 to 16 dims of size 1 or more with a "
               "product below 2^63");
  EXPECT_ERROR(Mesh::make({1ll << 40, 1ll << 40}), kInvalidArgument,
               "[mesh] a mesh cannot have this shape; got 1099511627776x1099511627776; expected 1 to 16 dims of size 1 "
               "or more with a product below 2^63");
  EXPECT_ERROR(Mesh::make({2, 3}, {"dp", "dp"}), kInvalidArgument,
               "[mesh] two mesh dims have the same name; got 'dp' twice in (dp,dp); expected distinct names");
  EXPECT_ERROR(Mesh::make({2, 3}, {"dp"}), kInvalidArgument,
               "[mesh] names and mesh dims differ in number; got 1 names (dp) for 2 mesh dims; expected one name for "
               "each mesh dim, or none at all");
  EXPECT_ERROR(Mesh::make({2}, {"d p"}), kInvalidArgument,
               "[mesh] a mesh dim's name cannot be printed; got 'd p'; expected a letter or '_', then letters, digits, "
               "'_', '.' or '-'");
  EXPECT_ERROR(Mesh::from_ranks({2, 2}, {0, 1, 2, 1}), kInvalidArgument,
               "[mesh] ranks overlap; got rank 1 twice; expected distinct ranks");
  EXPECT_ERROR(Mesh::from_ranks({2}, {0, -1}), kInvalidArgument,
               "[mesh] a rank is out of range; got -1; expected 0 or more");
  EXPECT_ERROR(Mesh::from_ranks({2}, {0, 1, 2}), kInvalidArgument,
               "[mesh] the rank list does not fill the mesh; got 3 ranks for 2; expected 2 ranks");
}

TEST(Errors, MeshParts) {
  EXPECT_ERROR(kMesh["pp"], kInvalidArgument,
               "[mesh] no mesh dim of this name; got 'pp' of 2x3(dp,tp); expected one of (dp,tp)");
  EXPECT_ERROR(
      Mesh::make({2})["dp"], kInvalidArgument,
      "[mesh] the mesh dims have no names; got 'dp' of 2; expected a mesh with names; try naming the dims when "
      "the mesh is made");
  EXPECT_ERROR(kMesh.slice({"tp", "dp"}), kInvalidArgument,
               "[mesh.slice] names out of order; got (tp,dp) of 2x3(dp,tp); expected the order of the mesh, (dp,tp)");
  EXPECT_ERROR(kMesh.slice({"dp", "dp"}), kInvalidArgument, "[mesh.slice] a mesh dim was named twice; got (dp,dp)");
  EXPECT_ERROR(kMesh.slice({}), kInvalidArgument, "[mesh.slice] no mesh dim was named; expected one name or more");
  EXPECT_ERROR(kMesh.flatten({"dp", "tp"}, "dp"), kInvalidArgument,
               "[mesh.flatten] a mesh dim has this name already; got 'dp' in 2x3(dp,tp); expected a new name");
  EXPECT_ERROR(kMesh.unflatten("tp", {2, 2}, {"a", "b"}), kInvalidArgument,
               "[mesh.unflatten] the sizes do not multiply to the mesh dim; got 2x2 for a dim of size 3; expected a "
               "product of 3");
  EXPECT_ERROR(kMesh.unflatten("tp", {3, 1}, {"a"}), kInvalidArgument,
               "[mesh.unflatten] names and sizes differ in number; got 1 names for 2 sizes; expected one name each");
  EXPECT_ERROR(kMesh.unflatten(2, {1}, {"a"}), kInvalidArgument,
               "[mesh.unflatten] no such mesh dim; got dim 2 of 2x3(dp,tp); expected 0 to 1");
  EXPECT_ERROR(Mesh::concatenate({kMesh["dp"], kMesh.flatten_all("all")}), kInvalidArgument,
               "[mesh.concatenate] mesh dims overlap; got (2,6):(3,1) does not tile: stride 3 is not a multiple of 6; "
               "expected every rank in exactly one row");
  EXPECT_ERROR(Mesh::concatenate({kMesh["dp"], Mesh::make({4}, {"x"})}), kInvalidArgument,
               "[mesh.concatenate] the meshes are not parts of one mesh; got 2(dp):[3] of 6 and 4(x); expected "
               "sub-meshes of one mesh");
  EXPECT_ERROR(kMesh.select("tp", 3), kInvalidArgument,
               "[mesh.select] the index is out of range; got 3 on 'tp'; expected 0 to 2");
}

TEST(Errors, DeviceMeshAndItsWorld) {
  EXPECT_ERROR(DeviceMesh(kMesh, DeviceKind::kCpu, 0, 4), kInvalidArgument,
               "[device_mesh] the mesh is larger than the world; got 2x3(dp,tp) in a world of 4; expected ranks below "
               "4; try a smaller mesh, or starting 6 ranks");
  EXPECT_ERROR(DeviceMesh(kMesh, DeviceKind::kCpu, 7, 7), kInvalidArgument,
               "[device_mesh] my rank is not in the world; got rank 7 of 7; expected 0 to the world's size minus 1");
  const DeviceMesh outside(kMesh, DeviceKind::kCpu, 6, 7);
  EXPECT_ERROR(outside.local_rank("dp"), kInvalidArgument,
               "[mesh.local_rank] this rank is not in the mesh; got rank 6 and 2x3(dp,tp); try asking contains_me() "
               "first");
  EXPECT_ERROR(DeviceMesh(kMesh, DeviceKind::kCpu, 0, 6).local_rank(), kInvalidArgument,
               "[mesh.local_rank] which mesh dim?; got 2x3(dp,tp); expected a dim or a name, as the mesh has several "
               "dims");
}

TEST(Errors, Specs) {
  EXPECT_ERROR(Spec::make(kMeta, kMesh, {Shard(0)}), kInvalidArgument,
               "[spec] placements and mesh dims differ in number; got 1 placements for 2x3(dp,tp); expected 2, one for "
               "each mesh dim");
  EXPECT_ERROR(Spec::make(kMeta, kMesh, {Shard(2), Replicate()}), kInvalidArgument,
               "[spec] no such tensor dim; got S(2) for f32[8,6]; expected a dim from -2 to 1");
  EXPECT_ERROR(Spec::make({{}, DType::kF32}, kMesh, {Shard(0), Replicate()}), kInvalidArgument,
               "[spec] a 0-d tensor cannot be sharded; got S(0) for f32[]; expected R or P");
  EXPECT_ERROR(
      Spec::make(kMeta, kMesh, {Partial(), Partial(ReduceOp::kMax)}), kInvalidArgument,
      "[spec] two reductions in one spec do not commute; got P(sum) and P(max); expected one reduction, or sum "
      "with avg");
  EXPECT_NO_THROW(Spec::make(kMeta, kMesh, {Partial(), Partial(ReduceOp::kAvg)}));
  EXPECT_ERROR(Spec::make({{8}, DType::kI64}, kMesh, {Partial(ReduceOp::kAvg), Replicate()}), kInvalidArgument,
               "[spec] values of this type have no such reduction; got P(avg) for i64[8]");
  EXPECT_ERROR(Spec::make(kMeta, kMesh, {Shard(0), Shard(0)}, {{0, {1}}}), kInvalidArgument,
               "[spec] the order leaves a mesh dim out; got the order of tensor dim 0 in f32[8,6] @ 2x3(dp,tp) : "
               "S(0),S(0); expected every mesh dim with a Shard on the tensor dim, once");
  EXPECT_ERROR(Spec::make(kMeta, kMesh, {Shard(0), Shard(0)}, {{0, {1, 1}}}), kInvalidArgument,
               "[spec] mesh dim 1 is not one that cuts it; got the order of tensor dim 0 in f32[8,6] @ 2x3(dp,tp) : "
               "S(0),S(0); expected every mesh dim with a Shard on the tensor dim, once");
  EXPECT_ERROR(
      Spec::make(kMeta, kMesh, {FactorShard(0, 1), Replicate()}), kInvalidArgument,
      "[spec] a cut of a factor does not say what the factors are; got S(0.1); expected S, R or P; try parsing "
      "a whole spec, or another tensor's spec");
  EXPECT_ERROR(StridedShard(0, 0), kInvalidArgument,
               "[StridedShard] the split factor is out of range; got 0; expected 1 or more");
}

TEST(Errors, LayoutsThatAreNotTheTensors) {
  const auto make = [](const DimLayout& first, const DimLayout& second, const Partials& partials) {
    (void)Spec::from_dims(kMeta, kMesh, {first, second}, partials);
  };
  const Partials none(2);
  const Factor six{6, {}};
  EXPECT_ERROR(make({Factor{7, {}}}, {six}, none), kInvalidArgument,
               "[spec] the factors do not multiply to the tensor dim; got 7 for dim 0; expected a layout of f32[8,6] @ "
               "2x3(dp,tp)");
  EXPECT_ERROR(make({Factor{8, {{0, 2}}}}, {Factor{6, {{0, 2}}}}, none), kInvalidArgument,
               "[spec] a mesh dim is used twice; got mesh dim 0; expected a layout of f32[8,6] @ 2x3(dp,tp)");
  EXPECT_ERROR(make({Factor{8, {{0, 2}}}}, {six}, Partials{ReduceOp::kSum, std::nullopt}), kInvalidArgument,
               "[spec] a mesh dim is used twice; got mesh dim 0; expected a layout of f32[8,6] @ 2x3(dp,tp)");
  EXPECT_ERROR(make({Factor{8, {{1, 2}}}}, {six}, none), kInvalidArgument,
               "[spec] a cut is not by a mesh dim; got mesh dim 1 into 2; expected a layout of f32[8,6] @ 2x3(dp,tp)");
  EXPECT_ERROR(make({Factor{8, {{Cut::kVirtual, 9}}}}, {six}, none), kInvalidArgument,
               "[spec] a virtual cut makes no pieces; got 9 of 8; expected a layout of f32[8,6] @ 2x3(dp,tp)");
}

TEST(Errors, TensorMeta) {
  EXPECT_ERROR(TensorMeta({1ll << 32, 1ll << 32}, DType::kF32), kInvalidArgument,
               "[tensor_meta] the sizes overflow; got [4294967296,4294967296]; expected fewer than 2^59 elements");
  EXPECT_ERROR(TensorMeta({0, 1ll << 62}, DType::kF32), kInvalidArgument,
               "[tensor_meta] the sizes overflow; got [1,4611686018427387904]; expected fewer than 2^59 elements");
  EXPECT_ERROR(TensorMeta({-1}, DType::kF32), kInvalidArgument, "[tensor_meta] a size is negative; got [-1]");
  EXPECT_ERROR(TensorMeta({2}, {1, 1}, DType::kF32), kInvalidArgument,
               "[tensor_meta] sizes and strides differ in number; got 1 sizes and 2 strides");
}

TEST(Errors, Views) {
  const Spec spec = Spec::make(kMeta, kMesh, {Shard(0), Replicate()});
  EXPECT_ERROR((void)unflatten(spec, 0, {3, 3}), kInvalidArgument,
               "[unflatten] the sizes do not multiply to the dim; got [3,3] for dim 0 of f32[8,6] @ 2x3(dp,tp) : "
               "S(0),R; expected a product of 8");
  EXPECT_ERROR(
      (void)flatten(spec, 0, 2), kInvalidArgument,
      "[flatten] no such tensor dim; got dim 2 of f32[8,6] @ 2x3(dp,tp) : S(0),R; expected a dim from -2 to 1");
  EXPECT_ERROR((void)permute(spec, {0, 0}), kInvalidArgument,
               "[permute] not an order of the tensor's dims; got (0,0) for f32[8,6] @ 2x3(dp,tp) : S(0),R; expected "
               "every dim once");
  EXPECT_ERROR((void)reshape(spec, {7, 7}), kInvalidArgument,
               "[reshape] the shape does not have the tensor's elements; got [7,7] for f32[8,6] @ 2x3(dp,tp) : S(0),R; "
               "expected 48 elements");
  EXPECT_ERROR((void)narrow(spec, 0, 7, 2), kInvalidArgument,
               "[narrow] the range is not inside the dim; got start 7, length 2 on dim 0 of f32[8,6] @ 2x3(dp,tp) : "
               "S(0),R; expected a range of 0 to 8");
}

TEST(Errors, MalformedText) {
  EXPECT_ERROR(parse_placements("S(0),X"), kInvalidArgument,
               "[parse_placements] no placement at column 6; got 'S(0),X'; expected placements such as "
               "S(0),S(1,2),R,P(sum), one for each mesh dim");
  EXPECT_ERROR(parse_placements("P(mean)"), kInvalidArgument,
               "[parse_placements] unknown reduction 'mean' at column 7; got 'P(mean)'; expected placements such as "
               "S(0),S(1,2),R,P(sum), one for each mesh dim");
  EXPECT_ERROR(parse_placements("S(99999999999999999999)"), kInvalidArgument,
               "[parse_placements] a number that does not fit in 64 bits at column 3; got 'S(99999999999999999999)'; "
               "expected placements such as S(0),S(1,2),R,P(sum), one for each mesh dim");
  EXPECT_ERROR(Mesh::parse("2x"), kInvalidArgument,
               "[parse_mesh] missing number at column 3; got '2x'; expected a mesh such as 2x3(dp,tp), dp=2,tp=3 or "
               "3(tp):[1] of 6");
  EXPECT_ERROR(Mesh::parse("dp=2,tp"), kInvalidArgument,
               "[parse_mesh] missing '=' at column 8; got 'dp=2,tp'; expected a mesh such as 2x3(dp,tp), dp=2,tp=3 or "
               "3(tp):[1] of 6");
  EXPECT_ERROR(Mesh::parse("2 of [0..9223372036854775807]"), kInvalidArgument,
               "[parse_mesh] an empty or endless range of ranks at column 29; got '2 of [0..9223372036854775807]'; "
               "expected a mesh such as 2x3(dp,tp), dp=2,tp=3 or 3(tp):[1] of 6");
  EXPECT_ERROR(Spec::parse("f33[8] @ 2 : R"), kInvalidArgument,
               "[parse_spec] unknown type 'f33' at column 4; got 'f33[8] '; expected a spec such as f32[8,6] @ "
               "2x2(dp,tp) : S(0),R");
  EXPECT_ERROR(Spec::parse("f32[8] @ 2 : R,R"), kInvalidArgument,
               "[parse_spec] more placements than the mesh has dims at column 4; got 'R,R'; expected a spec such as "
               "f32[8,6] @ 2x2(dp,tp) : S(0),R");
  EXPECT_ERROR(Spec::parse("f32[8] @ 2x2 : R"), kInvalidArgument,
               "[spec] placements and mesh dims differ in number; got 1 placements for 2x2; expected 2, one for each "
               "mesh dim");
  EXPECT_ERROR(Spec::parse("hello\n"), kInvalidArgument,
               "[parse_spec] not a spec at column 1; got 'hello\\x0a'; expected a spec such as f32[8,6] @ 2x2(dp,tp) : "
               "S(0),R");
}

}  // namespace
}  // namespace dtensor
