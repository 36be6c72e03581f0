// dtensor train: a transformer on any mesh, of threads, processes or under mpirun.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include "dtensor/comm/launch.h"
#include "examples/gpt/report.h"

namespace {

struct Arguments {
  TrainOptions train;
  std::string mesh = "dp=1";
  std::string ranks = "threads";
  std::vector<std::string> data;
  std::string device = "cpu";
  bool compare = false;
  bool quiet = false;
  std::string csv, svg;
};

std::string read_text(const std::vector<std::string>& paths) {
  std::string text;
  for (const std::string& path : paths) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    if (!file || !(content << file.rdbuf())) {
      dtensor::fail_invalid(
          "dtensor train", {.what = "the text cannot be read", .got = "\"" + path + "\"", .advice = "--data file.txt"});
    }
    text += content.str();
  }
  return text;
}

void check(const Arguments& arguments, const dtensor::Mesh& mesh, const Tokens& tokens) {
  const auto refuse = [](const std::string& what, const std::string& got, const std::string& expected) {
    dtensor::fail_invalid("dtensor train", {.what = what, .got = got, .expected = expected});
  };
  const TrainOptions& train = arguments.train;
  for (const std::string& name : mesh.names()) {
    if (name != "dp" && name != "tp" && name != "replica")
      refuse("a mesh dim without a meaning", name, "dp, tp or replica");
  }
  if (mesh.names().empty()) refuse("mesh dims without names", arguments.mesh, "dp=2,tp=2");
  if (train.parallel.fsdp && std::find(mesh.names().begin(), mesh.names().end(), "dp") == mesh.names().end()) {
    refuse("--fsdp without a mesh dim to shard over", arguments.mesh, "one named dp");
  }
  if (train.model.width % train.model.heads != 0) {
    refuse("heads that do not divide the width",
           std::to_string(train.model.heads) + " of " + std::to_string(train.model.width), "a divisor");
  }
  if (tokens.size() <= train.model.context) {
    refuse("too little text for one sequence", std::to_string(tokens.size()) + " bytes",
           "more than --context " + std::to_string(train.model.context));
  }
}

// One rank's run; rank 0 tells.
TrainResult run_rank(dtensor::World& world, const Arguments& arguments, const dtensor::Mesh& mesh,
                     const Tokens& tokens) {
  const dtensor::DeviceMesh ranks = dtensor::init_device_mesh(world, arguments.train.device, mesh);
  dtensor::manual_seed(world, static_cast<std::uint64_t>(arguments.train.seed));
  ProgressBar bar(mesh.to_string(), arguments.train.steps);
  return train(tokens, arguments.train, &ranks, [&](std::int64_t step, double loss, const TrainResult& so_far) {
    if (world.rank() == 0 && !arguments.quiet) bar.show(step, loss, so_far);
  });
}

void report(const Arguments& arguments, const dtensor::Mesh& mesh, const Tokens& tokens, const TrainResult& result) {
  std::vector<Curve> curves{{mesh.to_string() + " " + arguments.ranks, result.losses}};
  TrainResult plain;
  if (arguments.compare) {
    ProgressBar bar("plain libtorch", arguments.train.steps);
    TrainOptions whole = arguments.train;
    whole.save = whole.resume = "";
    plain = train(tokens, whole, nullptr, [&](std::int64_t step, double loss, const TrainResult& so_far) {
      if (!arguments.quiet) bar.show(step, loss, so_far);
    });
    plain.losses.erase(plain.losses.begin(), plain.losses.begin() + result.first_step);
    curves.push_back({"plain libtorch", plain.losses});
  }
  if (result.losses.empty()) {
    std::cout << "nothing to do: the checkpoint is of step " << result.first_step << "\n";
    return;
  }
  std::cout << table_of(curves[0].name, result, arguments.compare ? &plain : nullptr);
  if (!arguments.csv.empty()) write_csv(arguments.csv, curves, result.first_step);
  if (!arguments.svg.empty()) write_svg(arguments.svg, curves);
}

int start_processes(const dtensor::Mesh& mesh, int argc, char** argv) {
  dtensor::LaunchOptions options;
  options.command = {std::filesystem::read_symlink("/proc/self/exe").string()};
  for (int i = 1; i < argc; ++i) options.command.emplace_back(argv[i]);
  options.command.insert(options.command.end(), {"--ranks", "env"});
  options.ranks = mesh.size();
  return dtensor::launch(options);
}

int start_mpi(const dtensor::Mesh& mesh, int argc, char** argv) {
  std::vector<std::string> words = {"mpirun",
                                    "--oversubscribe",
                                    "--bind-to",
                                    "none",
                                    "-n",
                                    std::to_string(mesh.size()),
                                    std::filesystem::read_symlink("/proc/self/exe").string()};
  for (int i = 1; i < argc; ++i) words.emplace_back(argv[i]);
  words.insert(words.end(), {"--ranks", "env"});
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const auto threads = std::max<std::int64_t>(1, std::thread::hardware_concurrency() / mesh.size());
  setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), 0);
  if (geteuid() == 0) {
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
  }
  execvp("mpirun", pointers.data());
  dtensor::fail_invalid("dtensor train",
                        {.what = "mpirun cannot be started", .advice = "Open MPI, or --ranks threads"});
}

int run(Arguments& arguments, int argc, char** argv) {
  const dtensor::Mesh mesh = dtensor::Mesh::parse(arguments.mesh);
  const Tokens tokens(read_text(arguments.data));
  arguments.train.model.vocabulary = tokens.vocabulary();
  if (arguments.device == "cuda") arguments.train.device = at::kCUDA;
  check(arguments, mesh, tokens);
  if (arguments.ranks == "processes") return start_processes(mesh, argc, argv);
  if (arguments.ranks == "mpi") return start_mpi(mesh, argc, argv);
  if (arguments.ranks == "env") {
    dtensor::World world = dtensor::World::from_env({.backend = arguments.device == "cuda" ? "nccl" : ""});
    if (world.size() != mesh.size()) {
      dtensor::fail_invalid("dtensor train",
                            {.what = "the mesh is not the world's",
                             .got = mesh.to_string() + " and " + std::to_string(world.size()) + " ranks"});
    }
    const TrainResult result = run_rank(world, arguments, mesh, tokens);
    if (world.rank() == 0) report(arguments, mesh, tokens, result);
    return 0;
  }
  TrainResult result;
  dtensor::run_ranks(mesh.size(), [&](dtensor::World& world) {
    TrainResult mine = run_rank(world, arguments, mesh, tokens);
    if (world.rank() == 0) result = std::move(mine);
  });
  report(arguments, mesh, tokens, result);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  TrainOptions& train = arguments.train;
  CLI::App app("Train a transformer on any mesh", "dtensor train");
  app.add_option("--mesh", arguments.mesh, "Dims by name: dp (data), tp (tensor), replica (around dp)")
      ->capture_default_str();
  app.add_option("--ranks", arguments.ranks, "What ranks are; env: as this program was started")
      ->check(CLI::IsMember({"threads", "processes", "mpi", "env"}))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->capture_default_str();
  app.add_option("--device", arguments.device, "With cuda, ranks are processes over NCCL")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_flag("--fsdp", train.parallel.fsdp, "Cut parameters, gradients and optimizer states over dp");
  app.add_flag("--sequence-parallel", train.parallel.sequence_parallel, "Cut activations along the sequence over tp");
  app.add_flag("--loss-parallel", train.parallel.loss_parallel, "Leave the logits cut over the vocabulary");
  app.add_option("--data", arguments.data, "Text to train on; several files are put together")->required();
  app.add_option("--steps", train.steps)->check(CLI::Range(1, 100'000'000))->capture_default_str();
  app.add_option("--batch", train.batch, "Sequences per step, of all ranks together")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--context", train.model.context, "Tokens per sequence")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--width", train.model.width)->check(CLI::Range(1, 1 << 20))->capture_default_str();
  app.add_option("--heads", train.model.heads)->check(CLI::Range(1, 1 << 20))->capture_default_str();
  app.add_option("--layers", train.model.layers)->check(CLI::Range(1, 10'000))->capture_default_str();
  app.add_option("--dropout", train.model.dropout)->check(CLI::Range(0.0, 0.99))->capture_default_str();
  app.add_option("--lr", train.learning_rate, "AdamW's learning rate")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", train.seed)->capture_default_str();
  app.add_option("--dtype", train.dtype, "Of parameters; bf16 with --fsdp: while they are used")
      ->check(CLI::IsMember({"f32", "f64", "bf16"}))
      ->capture_default_str();
  app.add_option("--save", train.save, "Write checkpoints into this folder, the last two are kept");
  app.add_option("--save-every", train.save_every, "Steps; 0: after the last step")->check(CLI::Range(0, 100'000'000));
  app.add_option("--resume", train.resume, "Go on from the newest checkpoint in this folder, of any mesh");
  app.add_flag("--compare", arguments.compare, "Train on plain libtorch too, and say how far the losses are apart");
  app.add_option("--csv", arguments.csv, "Write the losses");
  app.add_option("--svg", arguments.svg, "Draw the losses");
  app.add_flag("--quiet", arguments.quiet, "No progress");
  try {
    app.parse(argc, argv);
    return run(arguments, argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::cerr << "dtensor: " << error.what() << "\n";
    return 2;
  }
}
