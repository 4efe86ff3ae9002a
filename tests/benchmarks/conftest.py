from tests.server.fake_grid import inside_a_run as inside_a_run
