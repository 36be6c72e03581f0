// The Python module dtensor._dtensor. A distributed tensor is a torch.Tensor in Python too, so what is bound is how to
// make, move and ask one; operators are torch's own. Whatever may wait for another rank releases the GIL.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/core/error.h"
#include "dtensor/dtensor.h"

namespace py = pybind11;

namespace dtensor {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// A rank's world as Python holds it: Python may keep the object for longer than the rank runs.
class WorldHandle {
 public:
  explicit WorldHandle(World& world) : world_(&world) {}
  World& get() const {
    if (world_) return *world_;
    fail_invalid("World", {.what = "its rank has ended", .advice = "use it inside the function given to run_ranks"});
  }
  void end() { world_ = nullptr; }

 private:
  World* world_;
};

void run_ranks_in_python(std::int64_t n, const py::function& body, std::optional<double> timeout) {
  WorldOptions options;
  if (timeout) options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(*timeout * 1000));
  const py::gil_scoped_release unlocked;
  run_ranks(
      n,
      [&](World& world) {
        const py::gil_scoped_acquire locked;
        const auto handle = std::make_shared<WorldHandle>(world);
        struct End {
          ~End() { handle->end(); }
          std::shared_ptr<WorldHandle> handle;
        } const end{handle};
        body(handle);
      },
      options);
}

DeviceMesh mesh_in(const WorldHandle& world, const std::vector<std::int64_t>& shape,
                   const std::vector<std::string>& names, const std::string& device) {
  return init_device_mesh(world.get(), c10::Device(device).type(), Dims(shape.begin(), shape.end()), names);
}

std::vector<std::int64_t> ints(const Dims& dims) { return {dims.begin(), dims.end()}; }

std::optional<Dims> dims_of(const std::optional<std::vector<std::int64_t>>& shape) {
  if (!shape) return std::nullopt;
  return Dims(shape->begin(), shape->end());
}

// The arguments that operators have: tensors, numbers, text, and lists of tensors or ints.
c10::IValue value_of(const py::handle arg) {
  if (arg.is_none()) return {};
  if (THPVariable_Check(arg.ptr())) return arg.cast<at::Tensor>();
  if (py::isinstance<py::bool_>(arg)) return arg.cast<bool>();
  if (py::isinstance<py::int_>(arg)) return arg.cast<std::int64_t>();
  if (py::isinstance<py::float_>(arg)) return arg.cast<double>();
  if (py::isinstance<py::str>(arg)) return arg.cast<std::string>();
  if (py::isinstance<py::sequence>(arg)) {
    const auto items = py::reinterpret_borrow<py::sequence>(arg);
    if (!items.empty() && THPVariable_Check(py::object(items[0]).ptr())) return arg.cast<std::vector<at::Tensor>>();
    return arg.cast<std::vector<std::int64_t>>();
  }
  fail_invalid("explain", {.what = "an argument of a type that cannot be taken",
                           .got = py::str(py::type::of(arg)).cast<std::string>(),
                           .expected = "tensors, numbers, text, lists of tensors or ints"});
}

std::string explain_in_python(const std::string& op, const py::args& args) {
  std::vector<c10::IValue> values;
  for (const py::handle arg : args) values.push_back(value_of(arg));
  const py::gil_scoped_release unlocked;
  return explain_call(op, std::move(values));
}

// `with CommRecorder() as recorder:`; what is recorded can be read afterwards too.
class PythonRecorder {
 public:
  void enter() { recorder_.emplace(); }
  void exit() {
    events_ = recorder_ ? recorder_->events() : std::vector<CommEvent>();
    recorder_.reset();
  }
  std::vector<CommEvent> events() const { return recorder_ ? recorder_->events() : events_; }

 private:
  std::optional<CommRecorder> recorder_;
  std::vector<CommEvent> events_;
};

// `with Guard(…):` for guards that hold while a block runs.
template <class Guard, class... Args>
class Scope {
 public:
  explicit Scope(Args... args) : args_(args...) {}
  void enter() {
    std::apply([&](Args... args) { guard_.emplace(args...); }, args_);
  }
  void exit() { guard_.reset(); }

 private:
  std::tuple<Args...> args_;
  std::optional<Guard> guard_;
};

template <class T, class... Options>
void bind_scope(py::class_<T, Options...>& bound) {
  bound.def("__enter__", [](py::object self) {
    self.cast<T&>().enter();
    return self;
  });
  bound.def("__exit__", [](T& self, const py::args&) { self.exit(); });
}

void bind_ranks(py::module_& module) {
  py::class_<WorldHandle, std::shared_ptr<WorldHandle>>(module, "World", "One rank's place among all ranks.")
      .def_property_readonly("rank", [](const WorldHandle& world) { return world.get().rank(); })
      .def_property_readonly("size", [](const WorldHandle& world) { return world.get().size(); });
  module.def("run_ranks", &run_ranks_in_python, py::arg("n"), py::arg("body"), py::arg("timeout") = py::none(),
             "Calls body(world) as ranks 0 … n-1, each on a thread of its own, and returns when all have ended. A rank "
             "that raises releases the others; the first error is raised again. timeout: seconds of every wait.");

  py::class_<DeviceMesh>(module, "DeviceMesh", "An n-d arrangement of ranks with named dims, as one rank sees it.")
      .def_property_readonly("ndim", [](const DeviceMesh& mesh) { return mesh.ndim(); })
      .def_property_readonly("size", [](const DeviceMesh& mesh) { return mesh.size(); })
      .def_property_readonly("shape", [](const DeviceMesh& mesh) { return ints(mesh.shape()); })
      .def_property_readonly("names", [](const DeviceMesh& mesh) { return mesh.names(); })
      .def_property_readonly("rank", &DeviceMesh::rank)
      .def_property_readonly("coordinate",
                             [](const DeviceMesh& mesh) -> std::optional<std::vector<std::int64_t>> {
                               if (!mesh.coordinate()) return std::nullopt;
                               return ints(*mesh.coordinate());
                             })
      .def("__getitem__", [](const DeviceMesh& mesh, const std::string& name) { return mesh[name]; })
      .def("__eq__", [](const DeviceMesh& a, const DeviceMesh& b) { return a == b; })
      .def("__repr__", [](const DeviceMesh& mesh) { return mesh.to_string(); });
  module.def("init_device_mesh", &mesh_in, py::arg("world"), py::arg("shape"),
             py::arg("names") = std::vector<std::string>(), py::arg("device") = "cpu", Unlocked(),
             "Ranks 0 … product-1 of the world as a mesh.");
}

void bind_tensors(py::module_& module) {
  module.def("is_dtensor", &is_dtensor, py::arg("tensor"));
  module.def(
      "distribute_tensor",
      [](const at::Tensor& full, const DeviceMesh& mesh, const std::string& placements) -> at::Tensor {
        return distribute_tensor(full, mesh, parse_placements(placements));
      },
      py::arg("full"), py::arg("mesh"), py::arg("placements"), Unlocked(),
      "A whole tensor, given alike on all ranks, laid out by placements such as 'S(0),R'. Moves nothing.");
  module.def(
      "from_local",
      [](const at::Tensor& local, const DeviceMesh& mesh, const std::string& placements,
         const std::optional<std::vector<std::int64_t>>& shape, bool check) -> at::Tensor {
        return from_local(local, mesh, parse_placements(placements), {.shape = dims_of(shape), .check = check});
      },
      py::arg("local"), py::arg("mesh"), py::arg("placements"), py::arg("shape") = py::none(), py::arg("check") = false,
      Unlocked(), "Every rank's part as one tensor; shape is the global one, needed where shards are uneven.");
  module.def(
      "to_local", [](const at::Tensor& tensor) { return DTensor(tensor).to_local(); }, py::arg("tensor"), Unlocked(),
      "This rank's part, sharing memory.");
  module.def(
      "full_tensor", [](const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); }, py::arg("tensor"),
      Unlocked(), "The whole tensor, on every rank.");
  module.def(
      "redistribute",
      [](const at::Tensor& tensor, const std::string& placements) -> at::Tensor {
        return DTensor(tensor).redistribute(parse_placements(placements));
      },
      py::arg("tensor"), py::arg("placements"), Unlocked(), "The same tensor laid out otherwise.");
  module.def(
      "placements", [](const at::Tensor& tensor) { return to_string(DTensor(tensor).placements()); }, py::arg("tensor"),
      "As text: 'S(0),R,P(sum)'.");
  module.def(
      "spec", [](const at::Tensor& tensor) { return DTensor(tensor).spec().to_string(); }, py::arg("tensor"),
      "As text: 'f32[8,6] @ 2x2(dp,tp) : S(0),R'.");
  module.def(
      "mesh", [](const at::Tensor& tensor) { return DTensor(tensor).mesh(); }, py::arg("tensor"));
  module.def("explain", &explain_in_python, py::arg("op"),
             "How a call such as explain('mm', x, w) would run: rule, way, bytes, and the other ways. Runs nothing.");
}

void bind_watching(py::module_& module) {
  py::class_<CommEvent>(module, "CommEvent", "One collective, as this rank saw it.")
      .def_readonly("collective", &CommEvent::collective)
      .def_readonly("group", &CommEvent::group)
      .def_readonly("ranks", &CommEvent::ranks)
      .def_readonly("bytes", &CommEvent::bytes)
      .def_readonly("op", &CommEvent::op)
      .def_readonly("reason", &CommEvent::reason)
      .def("__repr__", [](const CommEvent& event) {
        return event.collective + " over " + event.group + ", " + std::to_string(event.bytes) + " bytes, for " +
               event.op + ": " + event.reason;
      });
  py::class_<PythonRecorder> recorder(module, "CommRecorder", "Writes down every collective of its block.");
  recorder.def(py::init<>()).def("events", &PythonRecorder::events);
  bind_scope(recorder);

  using Replication = Scope<ImplicitReplication>;
  py::class_<Replication> replication(module, "ImplicitReplication", "Plain tensors in its block count as Replicate.");
  replication.def(py::init<>());
  bind_scope(replication);
  using Rules = Scope<NoRuleGuard, NoRule>;
  py::class_<Rules> rules(module, "RequireRules", "In its block, an operator without a rule is an error.");
  rules.def(py::init([] { return std::make_unique<Rules>(NoRule::kRefuse); }));
  bind_scope(rules);
}

}  // namespace
}  // namespace dtensor

PYBIND11_MODULE(_dtensor, module) {
  module.doc() = "Distributed tensors for libtorch";
  py::register_exception<dtensor::Error>(module, "Error", PyExc_RuntimeError);
  dtensor::bind_ranks(module);
  dtensor::bind_tensors(module);
  dtensor::bind_watching(module);
}
