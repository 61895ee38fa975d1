# <?php exit()?>
# Read, edit, create and upload for everyone: this wiki lives for one demo on the loopback interface.
*	@ALL	8
