#pragma once

#include "dtensor/runtime/dispatch_impl.h"

namespace dtensor {

// A plain tensor among a call's distributed operands becomes a replica on the call's mesh; a 0-d one that is only read
// stays a number. A plain tensor that is written keeps its memory, and gets the full result. One that requires a
// gradient gets a plain gradient, equal on all ranks. An error where plain operands are refused.
void take_plain(LocalCall& call, Operand& operand);

// The largest mesh among the operands', where the others are on sub-meshes of it.
void choose_mesh(LocalCall& call);

// An operand on another mesh object than the call's. On a sub-mesh it counts as replicated over the other dims, and its
// values are compared over them. An error where it belongs to another rank or another world.
void take_from_other_mesh(const LocalCall& call, Operand& operand);

// A number whose value is part of the call's key, and so of its identity.
bool is_number_in_key(KeyUse use, const c10::IValue& value);
bool is_one(const c10::IValue& value);

}  // namespace dtensor
