from tests.engine.process.engines import own_directory as own_directory
