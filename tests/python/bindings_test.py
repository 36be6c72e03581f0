"""The Python package: ranks as threads, tensors made, moved and asked, errors of one rank."""

import threading
import unittest

import torch

import dtensor


class Bindings(unittest.TestCase):
    def run_ranks(self, n, body, **options):
        """What body(world) returns on each rank."""
        results = [None] * n

        def rank(world):
            results[world.rank] = body(world)

        dtensor.run_ranks(n, rank, **options)
        return results

    def test_a_tensor_is_made_and_read(self):
        full = torch.arange(30.0).view(5, 6)

        def body(world):
            mesh = dtensor.init_device_mesh(world, [2, 2], ["dp", "tp"])
            x = dtensor.distribute_tensor(full, mesh, "S(0),S(1)")
            self.assertTrue(dtensor.is_dtensor(x))
            self.assertFalse(dtensor.is_dtensor(full))
            self.assertEqual(dtensor.placements(x), "S(0),S(1)")
            self.assertEqual(dtensor.spec(x), "f32[5,6] @ 2x2(dp,tp) : S(0),S(1)")
            self.assertEqual(repr(dtensor.mesh(x)), "2x2(dp,tp)")
            moved = dtensor.redistribute(x, "R,S(0)")
            local = dtensor.to_local(moved)
            again = dtensor.from_local(local, mesh, "R,S(0)", shape=[5, 6], check=True)
            return mesh.coordinate, dtensor.to_local(x), dtensor.full_tensor(again)

        results = self.run_ranks(4, body)
        self.assertEqual([r[0] for r in results], [[0, 0], [0, 1], [1, 0], [1, 1]])
        self.assertTrue(torch.equal(results[3][1], full[3:, 3:]))
        for _, _, whole in results:
            self.assertTrue(torch.equal(whole, full))

    def test_gradients_and_communication_are_seen(self):
        full = torch.arange(12.0).view(4, 3)

        def body(world):
            mesh = dtensor.init_device_mesh(world, [2], ["tp"])
            x = dtensor.distribute_tensor(full, mesh, "S(0)").requires_grad_()
            with dtensor.CommRecorder() as recorder:
                self.assertEqual((x * x).sum().item(), 506.0)
            (x * x).sum().backward()
            return dtensor.placements(x.grad), dtensor.full_tensor(x.grad), recorder.events()

        for placements, gradient, events in self.run_ranks(2, body):
            self.assertEqual(placements, "S(0)")
            self.assertTrue(torch.equal(gradient, 2 * full))
            self.assertEqual([(e.group, e.ranks, e.op) for e in events], [("tp", 2, "aten::_local_scalar_dense")])

    def test_an_error_of_one_rank_releases_the_others(self):
        seen = [None] * 3

        def body(world):
            mesh = dtensor.init_device_mesh(world, [3])
            x = dtensor.distribute_tensor(torch.ones(6), mesh, "S(0)")
            if world.rank == 1:
                raise KeyError("rank one is unhappy")
            try:
                dtensor.full_tensor(x)
            except dtensor.Error as error:
                seen[world.rank] = str(error)
                raise

        with self.assertRaisesRegex(KeyError, "rank one is unhappy"):
            dtensor.run_ranks(3, body, timeout=30)
        for rank in (0, 2):
            self.assertIn("rank 1", seen[rank])
            self.assertIn("rank one is unhappy", seen[rank])

    def test_a_rank_that_does_not_come_is_an_error(self):
        stay = threading.Event()

        def body(world):
            mesh = dtensor.init_device_mesh(world, [2])
            x = dtensor.distribute_tensor(torch.ones(6), mesh, "S(0)")
            if world.rank == 1:
                stay.wait(20)
                return
            try:
                dtensor.full_tensor(x)
            finally:
                stay.set()

        with self.assertRaises(dtensor.Error):
            dtensor.run_ranks(2, body, timeout=0.2)

    def test_errors_say_what_is_wrong(self):
        def body(world):
            mesh = dtensor.init_device_mesh(world, [2])
            with self.assertRaisesRegex(dtensor.Error, "one placement per mesh dim"):
                dtensor.distribute_tensor(torch.ones(2), mesh, "S(0),R")
            x = dtensor.distribute_tensor(torch.ones(2, 2), mesh, "S(0)")
            self.assertEqual((x + torch.ones(2, 2)).sum().item(), 8.0)
            with dtensor.ImplicitReplication():
                self.assertEqual((x + torch.ones(2, 2)).sum().item(), 8.0)
            self.assertIn("aten::mm: mk,kn->mn", dtensor.explain("mm", x, x))
            return world

        worlds = self.run_ranks(2, body)
        with self.assertRaisesRegex(dtensor.Error, "its rank has ended"):
            worlds[0].rank  # noqa: B018


if __name__ == "__main__":
    unittest.main()
