# <?php exit()?>
# Nobody can log in to the demo's wiki; its ACL lets everybody edit.
